"""Recorded or drawn block diffusion: which places each pass decided, and what made FOCUS keep its rows."""
