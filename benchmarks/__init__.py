"""Programs that measure every figure in the documentation; results are JSON lines in `benchmarks/results`.

Modules are in folders by what they measure: the engine, the server, single kernels, training, the quality of
answers. `python -m benchmarks.decode` looks in every folder."""

from pathlib import Path

__path__ = [
    str(Path(__file__).parent / folder)
    for folder in (".", "engine", "serving", "kernels", "training", "quality")
]
