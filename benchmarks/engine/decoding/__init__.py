"""The parts of `benchmarks.decode`."""
