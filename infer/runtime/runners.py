"""What executes passes, by the word that a memory manager says (`runner_of`)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

from idlm.errors import UserError
from idlm.infer.memory.base import CANVAS, PAGED, MemoryManager, MemoryPlan
from idlm.infer.models.loader import LoadedModel, Outline
from idlm.infer.planning.arena import open_arena
from idlm.infer.runtime.canvas_runner import CanvasRunner
from idlm.infer.runtime.model_runner import PassRunner, Runner
from idlm.infer.settings import EngineSettings
from idlm.infer.sparse.stack import AcceleratorStack
from idlm.infer.state.kv_cache import KVCache, KVWritePolicy
from idlm.infer.state.page_pool import PagePool


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerParts:
    """What a runner may use; `open_cache` allocates the pages, for a runner that has them."""

    settings: EngineSettings
    model: LoadedModel
    pool: PagePool
    open_cache: Callable[[], KVCache]
    attention: str
    stack: AcceleratorStack | None
    memory: MemoryManager
    plan: MemoryPlan


@dataclass(frozen=True, slots=True)
class RunnerKind:
    """`resolve` returns the settings as this runner needs them, or raises UserError."""

    resolve: Callable[[EngineSettings, KVWritePolicy, Outline, Collection[str]], EngineSettings]
    make: Callable[[RunnerParts], PassRunner]


def _resolve_paged(
    settings: EngineSettings, policy: KVWritePolicy, outline: Outline, accelerators: Collection[str]
) -> EngineSettings:
    return settings


def _make_paged(parts: RunnerParts) -> Runner:
    return Runner(
        parts.model,
        parts.open_cache(),
        parts.pool,
        attention=parts.attention,
        stack=parts.stack,
        memory=parts.memory,
    )


def _resolve_canvas(
    settings: EngineSettings, policy: KVWritePolicy, outline: Outline, accelerators: Collection[str]
) -> EngineSettings:
    """Refuse what has no place in the template; passes are eager, because their plan follows their rows."""
    name = f"memory={settings.memory}"
    if policy.kind != "none":
        raise UserError(
            "IDLM-0471",
            f"{name} runs decoders that store nothing between passes, and this one keeps pages of keys and "
            "values",
            fix="use memory=caching, or decoder=full on a full-diffusion checkpoint",
        )
    moe = outline.spec.moe
    refused = {
        "a gated adapter": outline.adapter is not None,
        "experts in some layers only": moe is not None and (bool(moe.dense_layers) or moe.layer_step != 1),
        "a shared expert": moe is not None and moe.shared_ffn_width > 0,
        f"accelerators=[{','.join(accelerators)}]": bool(accelerators),
        f"tensor_parallel={settings.tensor_parallel}": settings.tensor_parallel > 1,
        f"weights={settings.weights}": settings.weights == "fp8",
        f"kv_cache={settings.kv_cache}": settings.kv_cache == "fp8",
        "graphs=on": settings.graphs == "on",
        "deterministic=true": settings.deterministic,
        f"attention={settings.attention}, which chooses paged attention": settings.attention != "auto",
    }
    found = [what for what, is_refused in refused.items() if is_refused]
    if found:
        raise UserError(
            "IDLM-0471",
            f"{name} does not support {'; '.join(found)}",
            fix="leave it out, or use memory=caching",
        )
    return replace(settings, graphs="off")


def _make_canvas(parts: RunnerParts) -> CanvasRunner:
    arena = open_arena(parts.settings.memory_arena, parts.model.device)
    return CanvasRunner(parts.model, arena, parts.pool, capacity=parts.plan.workspace_bytes)


RUNNERS: Mapping[str, RunnerKind] = {
    PAGED: RunnerKind(_resolve_paged, _make_paged),
    CANVAS: RunnerKind(_resolve_canvas, _make_canvas),
}
