"""What produced every figure in the README; results are JSON lines in `benchmarks/results`."""
