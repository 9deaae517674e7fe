"""Paged attention: `plan_attention` once per step, `paged_attention` once per layer.

A back end is a module with `problems` (every reason why it cannot run), `plan` and `run`; its plan names it.
R rows fed this pass, S physical KV slots, N query heads, K KV heads, C listed slots, H head dim."""

from __future__ import annotations

from types import ModuleType
from typing import Any, Protocol

import torch

from idlm.kernels.paged_attention import plain
from idlm.kernels.paged_attention.types import AttentionRows, BeforeBlock, HeadShape

BACKENDS = ("triton", "torch")
AUTO = {"cuda": ("triton", "torch"), "cpu": ("torch", "triton")}
"""The order in which back ends are tried, by device type."""


class BackendPlan(Protocol):
    """The data that all layers of one step share; opaque except for its back end and its rows."""

    @property
    def backend(self) -> str: ...

    @property
    def rows(self) -> AttentionRows: ...


def _module(backend: str) -> ModuleType:
    assert backend in BACKENDS, f"{backend=}"
    if backend == "torch":
        return plain
    # `triton` may be absent.
    from idlm.kernels.paged_attention import launch

    return launch


def problems(name: str, shape: HeadShape, *, device: torch.device, deterministic: bool = False) -> list[str]:
    """Every reason why back end `name` cannot compute such heads; empty when it can.

    `deterministic`: a row's result must not depend on the rest of the batch, bit for bit."""
    try:
        module = _module(name)
    except ImportError as error:
        return [f"cannot be imported: {error}"]
    return module.problems(shape, deterministic=deterministic, device=device)


def plan_attention(
    rows: AttentionRows,
    shape: HeadShape | None = None,
    *,
    backend: str = "torch",
    deterministic: bool = False,
    launch: Any = None,
) -> BackendPlan:
    """Plan one step by a back end without `problems`. Only "triton" needs `shape`; `launch`: its launch
    parameters (`choice.Launch`)."""
    is_whole = rows.listed_B is None or (rows.starts_B is not None and rows.num_listed > 0)
    assert is_whole, f"listed_B needs starts_B and the width of lists: {rows.num_listed=}"
    assert rows.first_slots_R is None or rows.starts_B is None, "windows do not go with blocks that see lists"
    return _module(backend).plan(rows, shape, deterministic=deterministic, launch=launch)


def paged_attention(
    q_RNH: torch.Tensor,
    k_cache_SKH: torch.Tensor,
    v_cache_SKH: torch.Tensor,
    plan: BackendPlan,
    *,
    scale: float,
    out: torch.Tensor | None = None,
    k_scale_K: torch.Tensor | None = None,
    v_scale_K: torch.Tensor | None = None,
    lists_BKC: torch.Tensor | None = None,
    before: BeforeBlock | None = None,
) -> torch.Tensor:
    """Return o_RNH (q's dtype, `out` if given) of one layer, whose new keys and values are already cached.

    q may be a view with any row and head strides. `k_scale_K`, `v_scale_K` (float32): factors of the keys and
    values of an fp8 cache; lossy, which the caller must report. `lists_BKC` (int32, contiguous): logical
    slots below the block that the rows of listed sequences see per KV head, each once, ascending, -1 after
    the last; given exactly if the plan's rows have `listed_B`. `before`: where to leave the sums over the
    slots before the block, for plans whose rows have `starts_B`."""
    assert (lists_BKC is None) == (plan.rows.listed_B is None), "lists belong to a plan with listed_B alone"
    if lists_BKC is not None:
        size = (plan.rows.block_table.shape[0], k_cache_SKH.shape[1], plan.rows.num_listed)
        assert lists_BKC.shape == size and lists_BKC.is_contiguous(), f"{lists_BKC.shape=} {size=}"
        assert lists_BKC.dtype == torch.int32, f"{lists_BKC.dtype=}"
    if before is not None:
        assert plan.rows.starts_B is not None, "sums before the block need a plan with starts_B"
        for sums_RN in (before.highest_RN, before.totals_RN):
            assert sums_RN.shape == q_RNH.shape[:2] and sums_RN.is_contiguous(), f"{sums_RN.shape=}"
            assert sums_RN.dtype == torch.float32, f"{sums_RN.dtype=}"
    caches = ((k_cache_SKH, k_scale_K), (v_cache_SKH, v_scale_K))
    return _module(plan.backend).run(
        q_RNH, caches, plan, scale=scale, out=out, lists_BKC=lists_BKC, before=before
    )
