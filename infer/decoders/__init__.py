"""Decoders: the rows of a pass and the tokens that it commits. One file each, found by `DECODERS`."""
