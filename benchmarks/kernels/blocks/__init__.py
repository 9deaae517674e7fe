"""Steps, arms and sweep of `benchmarks.block_attention`: attention of diffusion blocks."""
