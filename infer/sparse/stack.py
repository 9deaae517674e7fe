"""The accelerators of an engine: built from their names, checked, and started together in each pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from idlm.config import schema
from idlm.errors import UserError
from idlm.infer.sparse.accelerator import (
    ACCELERATORS,
    Accelerator,
    EngineSpec,
    KVAccelerator,
    PassView,
    RowsAccelerator,
)
from idlm.infer.sparse.sparse_pass import SparseKV
from idlm.infer.state.batch import StepPlan
from idlm.infer.state.kv_cache import KVCache
from idlm.kernels.paged_attention import BackendPlan
from idlm.kernels.row_compaction import find_index


class AcceleratorStack:
    """At most one accelerator of each side."""

    def __init__(self, members: Sequence[Accelerator]) -> None:
        self.members = members
        self.kv = next((each for each in members if isinstance(each, KVAccelerator)), None)
        self.rows = next((each for each in members if isinstance(each, RowsAccelerator)), None)

    @property
    def is_lossy(self) -> bool:
        """Whether answers follow another distribution than the decoder's own."""
        return any(each.exactness == "lossy" for each in self.members)

    @property
    def decodes_again(self) -> bool:
        return any(each.decodes_again for each in self.members)

    @property
    def eager(self) -> list[str]:
        """Names of accelerators whose passes a CUDA graph cannot hold."""
        return [each.name for each in self.members if not each.is_static]

    def allocate(self) -> int:
        """Allocate the state of lanes; returns the bytes per KV page in addition to keys and values."""
        for each in self.members:
            each.allocate()
        return sum(each.page_bytes() for each in self.members)

    def pass_bytes(self) -> int:
        """Bytes that a pass takes for them at most."""
        return sum(each.pass_bytes() for each in self.members)

    def allocate_pages(self, num_pages: int) -> None:
        for each in self.members:
            each.allocate_pages(num_pages)

    @torch.inference_mode()
    def reset(self, lanes: list[int]) -> None:
        for each in self.members:
            each.reset(lanes)

    def begin(
        self,
        plan: StepPlan,
        cache: KVCache,
        *,
        block_table_BP: Tensor,
        page_size: int,
        slot_mapping_R: Tensor,
        scale: float,
        make_plan: Callable[[StepPlan, Tensor | None, int], BackendPlan],
    ) -> SparseKV | None:
        """Start a sparse pass; None if the pass is exact. `make_plan` plans attention
        of a plan's rows, of which sequences (bool, or None) see lists of so many slots."""
        if plan.active is None:
            return None
        active = plan.active
        rows_BW, is_mask_BW = find_index(
            plan.cu_rows_B1, plan.slots_R, plan.is_mask_R, active.starts_B, active.size
        )
        is_working_B = (rows_BW >= 0).any(dim=-1)
        view = PassView(
            plan=plan,
            active=active,
            cache=cache,
            block_table_BP=block_table_BP,
            page_size=page_size,
            scale=scale,
            rows_BW=rows_BW,
            is_working_B=is_working_B,
            is_mask_BW=is_mask_BW,
            needs_all_rows_B=torch.zeros_like(is_working_B),
        )
        kv = None if self.kv is None else self.kv.begin(view)
        if kv is not None and kv.needs_all_rows_B is not None:
            view.needs_all_rows_B = kv.needs_all_rows_B
        rows = None if self.rows is None else self.rows.begin(view)
        if kv is None and rows is None:
            return None
        return SparseKV(plan, view, slot_mapping_R, kv=kv, rows=rows, make_plan=make_plan)


def accelerator_configs(given: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Each accelerator's Config. UserError IDLM-0102 for an unknown name, IDLM-0461 for bad options."""
    problems: list[str] = []
    configs = {
        name: schema.build_options(ACCELERATORS.get(name).Config, options, problems, f"accelerators.{name}.")
        for name, options in given.items()
    }
    if problems:
        raise UserError("IDLM-0461", "; ".join(problems), fix="correct the accelerator options named")
    return configs


def stack_of(configs: Mapping[str, Any], spec: EngineSpec) -> AcceleratorStack:
    """The accelerators of an engine, from the Config of each by name. Raises UserError IDLM-0460 with every
    reason why they do not fit the engine or one another."""
    made = [ACCELERATORS.get(name)(config, spec) for name, config in configs.items()]
    reasons = [f"{each.name}: {problem}" for each in made for problem in each.problems()]
    if made and spec.has_windows:
        reasons.append("some layers of the model see a window of positions")
    sides: dict[str, list[str]] = {}
    for each in made:
        sides.setdefault(each.side, []).append(each.name)
    reasons += [
        f"{' and '.join(names)} are {'both' if len(names) == 2 else 'all'} of the {side} side (allowed: one "
        "of each side)"
        for side, names in sides.items()
        if len(names) > 1
    ]
    if reasons:
        raise UserError(
            "IDLM-0460",
            f"accelerators=[{','.join(configs)}] cannot work with this engine:"
            + "".join(f"\n  - {reason}" for reason in reasons),
            fix="set each to what is allowed, or leave the accelerator out (accelerators=[])",
        )
    return AcceleratorStack(made)
