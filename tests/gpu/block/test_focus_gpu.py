"""FOCUS on a GPU, in CUDA graphs and not, with the largest and the least capacity, against the CPU, which
tests/contracts compares with a slow reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from idlm.infer.accelerators.focus import FocusPass
from idlm.infer.runtime.graphs import cuda_graphs
from idlm.infer.sparse import row_reservation
from tests.contracts.accelerators.cases import TIGHT, force
from tests.contracts.accelerators.test_focus import CASES, PROMPTS, params, toys
from tests.contracts.engines import assert_idle, build_engine, clear_answers

__all__ = ["toys"]
STACKS: list[dict[str, Any]] = [{}, {"mage": {"k": 6, "exact_layers": 1}}]


@pytest.mark.parametrize("others", STACKS, ids=str)
@pytest.mark.parametrize(("shifted", "options", "focus"), CASES[::3], ids=str)
def test_attention_without_kernels_gives_the_tokens_of_a_cpu(
    toys: dict[bool, Path],
    shifted: bool,
    options: dict[str, Any],
    focus: dict[str, Any],
    others: dict[str, Any],
) -> None:
    options = {**options, "accelerators": {"focus": focus, **others}}
    expected = clear_answers(build_engine(toys[shifted], "block", **options), PROMPTS, params())
    engine = build_engine(toys[shifted], "block", device="cuda", attention="torch", **options)
    found = engine.generate(PROMPTS, params())
    assert [answer.token_ids for answer in found] == [answer.token_ids for answer in expected]
    assert_idle(engine)


EAGER: dict[str, Any] = {"graphs": "off"}
# Not for FOCUS by means of requests: those answers depend on preemption, as docs/accelerators.md says.
PREEMPTED: dict[str, Any] = {"num_inflight_steps": 4, "max_num_seqs": 4, "num_pages": 12}
IN_WAYS = [
    *((*case, STACKS[number % 2], {}) for number, case in enumerate(CASES)),
    (*CASES[0], STACKS[1], {}),
    *((*CASES[0], others, way) for others in STACKS for way in (EAGER, PREEMPTED)),
    *((*case, STACKS[1], EAGER) for case in (CASES[1], CASES[6])),
    *((*case, STACKS[1], PREEMPTED) for case in (CASES[2], CASES[4])),
    *((*case, STACKS[0], PREEMPTED) for case in (CASES[5], CASES[9])),
]


@pytest.mark.parametrize(("shifted", "options", "focus", "others", "way"), IN_WAYS, ids=str)
def test_graphs_and_waiting_change_no_token(
    toys: dict[bool, Path],
    monkeypatch: pytest.MonkeyPatch,
    shifted: bool,
    options: dict[str, Any],
    focus: dict[str, Any],
    others: dict[str, Any],
    way: dict[str, Any],
) -> None:
    """By late counts, and with the least capacity."""
    options = {**options, "page_size": 16, "accelerators": {"focus": focus, **others}}
    expected = clear_answers(build_engine(toys[shifted], "block", **options), PROMPTS, params())
    for is_tight in (False, True):
        with monkeypatch.context() as patch:
            if is_tight:
                force(patch, TIGHT)
                patch.setattr(row_reservation, "MIN_POSITIONS", 0)
                # A larger graph would hold all.
                patch.setattr(cuda_graphs, "CAPTURE_PASSES", -1)
            engine = build_engine(toys[shifted], "block", device="cuda", **options, **way)
            assert engine.settings.graphs == way.get("graphs", "on")
            found = engine.generate(PROMPTS, params())
        assert [answer.token_ids for answer in found] == [answer.token_ids for answer in expected]
        assert (engine.row_counts.num_waits > 0) == (
            is_tight and engine.settings.graphs == "on"
        ) or not is_tight
        assert_idle(engine)


def test_kept_rows_and_budgets_equal_those_of_a_cpu(
    toys: dict[bool, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pass by pass, one request alone, in passes that are not captured, so that they can be looked at."""
    shifted, options, focus = CASES[0]
    found: dict[str, list[Any]] = {}
    finish = FocusPass.finish

    def watched(one: FocusPass) -> None:
        finish(one)
        if one.view.is_mask_BW.any():
            assert one.budget_B is not None
            seen.append(((one.view.rows_BW[0] >= 0).tolist(), int(one.budget_B[0])))

    monkeypatch.setattr(FocusPass, "finish", watched)
    for device in ("cpu", "cuda"):
        seen = found[device] = []
        engine = build_engine(
            toys[shifted], "block", device=device, graphs="off", accelerators={"focus": focus}, **options
        )
        for prompt, setting in zip(PROMPTS, params(), strict=True):
            engine.generate([prompt], setting)
    assert len(found["cpu"]) > 20 and found["cuda"] == found["cpu"]
