"""Tiny full-diffusion checkpoints."""

from __future__ import annotations

from tests.contracts.full.canvases import family, llada

__all__ = ["family", "llada"]
