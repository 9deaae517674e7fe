"""Decoders: what a forward pass is fed and what is committed from it. One file each, found by `DECODERS`."""
