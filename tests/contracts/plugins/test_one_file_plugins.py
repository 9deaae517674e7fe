"""How many files a plug-in of each kind needs: one, which its registry finds; nothing else knows it."""

from __future__ import annotations

import sys
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
from tests.contracts.full.canvases import PROMPTS, engine_of, params_of, write_family
from tests.contracts.plugins.plugged_in import plugged_in

KINDS: list[Registry[Any]] = [
    DECODERS,
    FILE_TASKS,
    MEMORY_MANAGERS,
    FAMILIES,
    ACCELERATORS,
    TASKS,
    SOURCES,
    OBJECTIVES,
]
SLICES = """
from idlm.infer.memory.base import MEMORY_MANAGERS, MemoryPlan

@MEMORY_MANAGERS.register("slices")
class Slices:
    def plan(self, demand):
        num_chunks = -(-demand.transient.num_rows * demand.transient.row_bytes // 4096)
        return MemoryPlan(num_pages=min(demand.max_pages, 24), num_chunks=num_chunks)
"""


@pytest.mark.parametrize("registry", KINDS, ids=lambda registry: registry.kind)
def test_one_file_is_enough(registry: Registry[Any], tmp_path: Path) -> None:
    module, name = next(
        (module.__name__, name)
        for module in _modules()
        for name, value in vars(module).items()
        if value is registry
    )
    text = f"from {module} import {name}\n\n\n@{name}.register('plugin')\nclass Plugin:\n    pass\n"
    (tmp_path / f"plugin_{name.lower()}.py").write_text(text)
    before = registry.names()
    with plugged_in(registry, tmp_path) as added:
        assert added == ["plugin"]
        assert registry.get("plugin").__name__ == "Plugin"
    assert registry.names() == before


def test_a_manager_that_divides_the_head_changes_no_answer(tmp_path: Path) -> None:
    directory, options = write_family("llada", tmp_path), {"order": "entropy", "steps": 4}
    (tmp_path / "plugins").mkdir()
    (tmp_path / "plugins" / "slices.py").write_text(SLICES)
    with plugged_in(MEMORY_MANAGERS, tmp_path / "plugins"):
        found = []
        for memory in ("caching", "slices"):
            engine = engine_of(directory, options, memory=memory)
            params = [params_of(number, 0) for number in range(len(PROMPTS))]
            found.append([done.token_ids for done in engine.generate(PROMPTS, params)])
    assert engine.pool.num_pages == 24
    assert found[0] == found[1]


def test_every_registry_with_a_package_is_counted() -> None:
    """A new kind of plug-in needs an entry above."""
    found = [value for module in _modules() for value in vars(module).values() if isinstance(value, Registry)]
    assert {one.kind for one in KINDS} == {one.kind for one in found if one.package is not None}


def _modules() -> list[Any]:
    """Every loaded module of ours: kinds are defined beside their contracts, which the imports above load."""
    return [module for name, module in sys.modules.items() if name.startswith("idlm.")]
