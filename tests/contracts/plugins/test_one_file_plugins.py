"""How many files a plug-in of each kind needs: one, which its registry finds; nothing else knows it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from idlm.infer.decoders.base import DECODERS
from idlm.infer.evaluation.file_tasks import FILE_TASKS
from idlm.infer.memory.base import MEMORY_MANAGERS
from idlm.infer.models.base import FAMILIES
from idlm.infer.sparse.accelerator import ACCELERATORS
from idlm.registry import Registry
from idlm.tasks import TASKS
from idlm.train.data.base import SOURCES
from idlm.train.objectives.base import OBJECTIVES
from tests.contracts.plugins.plugged_in import plugged_in

KINDS: dict[str, tuple[Registry[Any], str]] = {
    "decoder": (
        DECODERS,
        """
from idlm.infer.decoders.ar import ArDecoder
from idlm.infer.decoders.base import DECODERS

@DECODERS.register("plugin")
class Plugin(ArDecoder):
    name = "plugin"
    baseline = None
    @classmethod
    def fits(cls, semantics):
        return None
""",
    ),
    "accelerator": (
        ACCELERATORS,
        """
from dataclasses import dataclass
from idlm.infer.sparse.accelerator import ACCELERATORS, KVAccelerator

@dataclass(frozen=True)
class Config:
    window: int = 4

@ACCELERATORS.register("plugin")
class Plugin(KVAccelerator):
    name = "plugin"
    Config = Config
""",
    ),
    "memory manager": (
        MEMORY_MANAGERS,
        """
from idlm.infer.memory.base import MEMORY_MANAGERS, MemoryPlan

@MEMORY_MANAGERS.register("plugin")
class Plugin:
    def plan(self, demand):
        return MemoryPlan(num_pages=demand.max_pages)
""",
    ),
    "family": (
        FAMILIES,
        """
from idlm.infer.models.base import FAMILIES, Family
from idlm.infer.models.config import dense_spec

@FAMILIES.register("plugin")
class Plugin(Family):
    @classmethod
    def spec(cls, config):
        return dense_spec(config, qkv_bias=False, o_bias=False, qk_norm=False)
""",
    ),
    "objective": (
        OBJECTIVES,
        """
from idlm.train.objectives.ar import Autoregressive
from idlm.train.objectives.base import OBJECTIVES

@OBJECTIVES.register("plugin")
class Plugin(Autoregressive):
    pass
""",
    ),
    "task": (
        TASKS,
        """
from idlm.tasks import TASKS
from idlm.tasks.ledger import Ledger

@TASKS.register("plugin")
class Plugin(Ledger):
    pass
""",
    ),
    "file task": (
        FILE_TASKS,
        """
from idlm.infer.evaluation.benchmarks.mathematics import Gsm8k
from idlm.infer.evaluation.file_tasks import FILE_TASKS

@FILE_TASKS.register("plugin")
class Plugin(Gsm8k):
    pass
""",
    ),
    "data source": (
        SOURCES,
        """
from idlm.train.data.base import SOURCES

@SOURCES.register("plugin")
def plugin(config, encoder):
    raise NotImplementedError
""",
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_one_file_is_enough(kind: str, tmp_path: Path) -> None:
    registry, text = KINDS[kind]
    (tmp_path / f"plugin_{kind.replace(' ', '_')}.py").write_text(text)
    before = registry.names()
    with plugged_in(registry, tmp_path) as added:
        assert added == ["plugin"]
        assert registry.get("plugin") is not None
    assert registry.names() == before


def test_every_registry_with_a_package_is_counted() -> None:
    """A new kind of plug-in needs an entry above."""
    counted = {registry.kind for registry, _ in KINDS.values()}
    assert counted == {
        found.kind
        for module in _registry_modules()
        for found in vars(module).values()
        if isinstance(found, Registry) and found.package is not None
    }


def _registry_modules() -> list[Any]:
    """Every loaded module of ours: kinds are defined beside their contracts, which the imports above load."""
    import sys

    return [module for name, module in sys.modules.items() if name.startswith("idlm.")]
