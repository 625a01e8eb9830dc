"""Attention of a draft tree's nodes over the cache and over one another, in one pass."""
