"""Convert an autoregressive checkpoint into an introspective diffusion language model, and generate."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from idlm.contracts import Completion, SamplingParams
    from idlm.infer.engine import Engine

__version__ = "0.1.0"
__all__ = ["Completion", "Engine", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    """Load the public classes on first use, so that `import idlm` stays cheap."""
    if name == "Engine":
        from idlm.infer.engine import Engine

        return Engine
    if name in ("Completion", "SamplingParams"):
        from idlm import contracts

        return getattr(contracts, name)
    raise AttributeError(f"module 'idlm' has no attribute {name!r}")
