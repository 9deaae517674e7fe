"""What tests of accelerators share: checkpoints, engines, and an eye on what passes compute and see."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from idlm.contracts import Completion, SamplingParams
from idlm.infer.engine import Engine
from idlm.infer.sparse.accelerator import ACCELERATORS, KVPass, PassView
from idlm.infer.sparse.row_reservation import RowReservation
from idlm.infer.state.batch import BlockLimits, PassRows
from idlm.semantics import Semantics
from tests.accelerator_reference import SlowMage, SlowQuest
from tests.block_reference import Rules
from tests.contracts.engines import MASK_ID, build_engine, prompts_of, write_converted_toy
from tests.toy import write_toy_checkpoint

SIZE, NUM_LAYERS = 8, 4
LENGTHS = (16, 1, 5, 24, 43, 19)
PROMPTS = prompts_of(LENGTHS, seed=3, vocab_size=MASK_ID)
SETTINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0, "max_tokens": 20},
    {"temperature": 1.0, "max_tokens": 17},
    {"temperature": 0.8, "top_k": 9, "max_tokens": 24},
    {"temperature": 0.0, "max_tokens": 13},
    {"temperature": 1.0, "top_p": 0.9, "max_tokens": 20},
    {"temperature": 0.7, "max_tokens": 22},
)
PARAMS = [SamplingParams(seed=seed, ignore_eos=True, **setting) for seed, setting in enumerate(SETTINGS)]
STRATEGY = {"strategy": "low_confidence_static", "steps": 6}
TOGETHER = {"max_num_batched_tokens": 256, "max_length": 96}
"""All prompts are admitted in the first pass, so lanes are numbered like prompts."""
THIN: dict[str, dict[str, Any]] = {"mage": {"k": 5}, "quest": {"k": 6, "page": 4}, "sparsed": {"k": 5}}
RULES: dict[str, Any] = {
    "mage": lambda: SlowMage(k=5),
    "quest": lambda: SlowQuest(k=6, page=4),
    "sparsed": lambda: SlowMage(k=5, exact_share=0.2),
}
KINDS = {name: ACCELERATORS.get(name) for name in ACCELERATORS.names()}
SIDES = {side: [name for name, kind in KINDS.items() if kind.side == side] for side in ("rows", "kv")}
STACKS = [(name,) for name in KINDS] + list(itertools.product(SIDES["rows"], SIDES["kv"]))
LOSSY = [name for name, kind in KINDS.items() if kind.exactness == "lossy"]

TIGHT = PassRows(fed=0, retained=0, head=0)
"""The least capacity: what is scheduled, and two blocks."""
FOCUS: list[dict[str, Any]] = [
    {"focus": {}},
    {"focus": {"commit": "unfrozen", "stability": "plain"}},
    {"focus": {"commit": "unfrozen"}, "mage": THIN["mage"]},
]


def force(patch: pytest.MonkeyPatch, capacity: PassRows | None) -> None:
    """In place of what late counts say, from the first pass on."""
    patch.setattr(
        RowReservation,
        "choose",
        lambda _, schedule: setattr(schedule, "limits", BlockLimits(capacity=capacity)),
    )


def exactly(stack: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """The options with which each is exact."""
    return {name: dict(ACCELERATORS.get(name).exact_options) for name in stack}


def thinly(stack: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """Options with which each thins a toy."""
    return {name: THIN.get(name, {}) for name in stack}


def write_toys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Block-causal checkpoints, logits in place and shifted, and a token-causal one."""
    found = {"causal": write_converted_toy(tmp_path_factory.mktemp("toy"))}
    for name, shifted in (("block", False), ("shifted", True)):
        found[name] = tmp_path_factory.mktemp("toy")
        architecture = "Qwen2" if shifted else "Qwen3"
        write_toy_checkpoint(
            found[name], architecture=architecture, sharpness=6.0, num_layers=NUM_LAYERS, max_positions=128
        )
        meaning = Semantics(causality="block", logit_shift=shifted, block_size=SIZE, mask_token_id=MASK_ID)
        meaning.save(found[name])
    return found


def rules_of(kind: str) -> Rules:
    return Rules(size=SIZE, mask=MASK_ID, shifted=kind == "shifted", **STRATEGY)  # type: ignore[arg-type]


def engine_of(toys: dict[str, Path], kind: str = "block", **options: Any) -> Engine:
    return build_engine(toys[kind], "block", **{**TOGETHER, **STRATEGY, **options})


def tokens(completions: list[Completion]) -> list[tuple[int, ...]]:
    return [completion.token_ids for completion in completions]


Trace = dict[tuple[int, int, int], list[list[int]] | None]


def watch_layers(
    engine: Engine, note: Callable[[PassView, KVPass, int, Tensor, Tensor | None], None]
) -> None:
    """Call `note` from now on with every pass, layer, queries and the slots that the layer sees."""
    accelerator = engine._parts.stack.kv
    assert accelerator is not None
    begin = accelerator.begin

    def watched(view: PassView) -> KVPass | None:
        made = begin(view)
        assert made is not None
        select = made.select_kv

        def watched_select(layer: int, q_RNH: Tensor) -> Tensor | None:
            slots_BKC = select(layer, q_RNH)
            note(view, made, layer, q_RNH, slots_BKC)
            return slots_BKC

        made.select_kv = watched_select  # type: ignore[method-assign]
        return made

    accelerator.begin = watched  # type: ignore[method-assign]


def watch_lists(engine: Engine) -> dict[int, Trace]:
    """What each layer of each pass sees from now on, by lane: block, step and layer, then KV head."""
    seen: dict[int, Trace] = {}

    def note(view: PassView, made: KVPass, layer: int, _: Tensor, slots_BKC: Tensor | None) -> None:
        for b in view.is_working_B.nonzero()[:, 0].tolist():
            key = int(view.active.starts_B[b]) // SIZE, int(view.active.num_passes_B[b]), layer
            is_exact = slots_BKC is None or not made.is_sparse_B[b]
            seen.setdefault(int(view.plan.lanes_B[b]), {})[key] = (
                None
                if is_exact or slots_BKC is None
                else [sorted(slots[slots >= 0].tolist()) for slots in slots_BKC[b]]
            )

    watch_layers(engine, note)
    return seen
