"""Moves the accepted path's keys and values to contiguous slots of the cache, in place."""
