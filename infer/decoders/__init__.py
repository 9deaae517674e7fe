"""Decoders: the rows that a pass is fed, and what is committed from it. One file each, found by `DECODERS`."""
