"""Speed of single kernels."""
