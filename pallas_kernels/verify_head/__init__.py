"""The end of a verify forward in one sweep: LM head, a token per node, most likely ids and the accepted path."""
