"""The registry of accelerators. An unknown name is refused with the list of what is installed."""

from __future__ import annotations

from typing import Any

from idlm.registry import Registry

ACCELERATORS: Registry[Any] = Registry("accelerator", "idlm.infer.accelerators")
