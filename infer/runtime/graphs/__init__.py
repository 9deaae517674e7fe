"""CUDA graphs of passes: their shapes, their captures, and the warm-up before the first request."""
