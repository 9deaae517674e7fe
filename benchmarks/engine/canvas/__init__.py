"""Arms, measurements and reports of `benchmarks.memory`: one denoising step of a full-diffusion canvas."""
