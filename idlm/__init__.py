"""Convert an autoregressive checkpoint into an introspective diffusion language model, and generate."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

# A CPU's products then give a row the same bits in a pass of any size, in the same time. MKL reads this when
# it is first used; CPUs without AVX2, and those of other makers than Intel, may ignore it.
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")

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
