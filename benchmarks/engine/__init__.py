"""Speed of the engine: decoding, block diffusion, soak, tensor parallelism."""
