"""FOCUS in the engine: whole generations against the slow reference, pass by pass and token for token."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from idlm.contracts import SamplingParams
from idlm.infer.accelerators.focus import Focus, FocusPass
from idlm.infer.engine import Engine
from idlm.infer.sparse.accelerator import PassView, RowSelection
from tests.block_reference import Rules, Sampling
from tests.contracts.accelerators.cases import write_toys
from tests.contracts.engines import MASK_ID, assert_idle, build_engine, prompts_of
from tests.focus_reference import FocusRules, SlowFocus

SIZE = 8
LENGTHS = (1, 5, 8, 19, 24, 13)
PROMPTS = prompts_of(LENGTHS, seed=2, vocab_size=MASK_ID)
SETTINGS = (
    {"temperature": 0.0, "max_tokens": 18},
    {"temperature": 1.0, "max_tokens": 15},
    {"temperature": 0.8, "top_k": 9, "max_tokens": 18},
    {"temperature": 0.0, "max_tokens": 11},
    {"temperature": 1.0, "top_p": 0.9, "max_tokens": 17},
    {"temperature": 0.7, "max_tokens": 18},
)
CASES: list[tuple[bool, dict[str, Any], dict[str, Any]]] = [
    (False, {"threshold": 0.5}, {}),
    (False, {"strategy": "low_confidence_static", "sub_block_size": 4}, {"mean": "request"}),
    (False, {"strategy": "sequential"}, {"importance": "block", "alpha": 1.2}),
    (True, {"threshold": 0.5}, {"importance": "block", "mean": "request"}),
    (True, {"strategy": "entropy_bounded", "entropy_bound": 1.5, "sub_block_size": 4}, {}),
    (True, {"strategy": "low_confidence_static", "steps": 4}, {"stability": "off"}),
    (False, {"threshold": 0.5}, {"rule": "published", "mean": "request"}),
    (False, {"threshold": 0.5}, {"commit": "unfrozen"}),
    (False, {"strategy": "low_confidence_static", "steps": 3}, {"stability": "plain", "commit": "unfrozen"}),
    (True, {"threshold": 0.5}, {"commit": "unfrozen"}),
]
"""Logits of the row before, the decoder's options and those of FOCUS."""
WAYS: list[dict[str, Any]] = [
    {},
    {"num_inflight_steps": 3, "max_num_seqs": 3, "max_num_batched_tokens": 9},
    {"fused_commit": False, "prefix_cache": False},
]
ALL_CASES = [(*case, WAYS[number % 3]) for number, case in enumerate(CASES)]


@pytest.fixture(scope="module")
def toys(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    found = write_toys(tmp_path_factory)
    return {False: found["block"], True: found["shifted"]}


def rules_of(shifted: bool, options: dict[str, Any]) -> Rules:
    fields = {"part" if key == "sub_block_size" else key: value for key, value in options.items()}
    return Rules(size=SIZE, mask=MASK_ID, shifted=shifted, **fields)


def slow_focus(
    directory: Path, shifted: bool, options: dict[str, Any], focus: dict[str, Any], **more: Any
) -> SlowFocus:
    fields = {key: value for key, value in focus.items() if key not in ("rule", "importance")} | more
    fields |= {"over": focus.get("importance", "masked"), "published": focus.get("rule") == "published"}
    return SlowFocus(directory, rules_of(shifted, options), FocusRules(size=SIZE, **fields))


def sampling(number: int) -> Sampling:
    return Sampling(seed=number, **SETTINGS[number])  # type: ignore[arg-type]


def params() -> list[SamplingParams]:
    return [
        SamplingParams(seed=seed, ignore_eos=True, **setting)  # type: ignore[arg-type]
        for seed, setting in enumerate(SETTINGS)
    ]


@pytest.fixture(scope="module")
def expected(toys: dict[bool, Path]) -> Callable[..., list[list[int]]]:
    known: dict[str, list[list[int]]] = {}

    def answers(shifted: bool, options: dict[str, Any], focus: dict[str, Any]) -> list[list[int]]:
        key = f"{shifted} {options} {focus}"
        if key not in known:
            slow = slow_focus(toys[shifted], shifted, options, focus)
            known[key] = [slow.answer(prompt, sampling(n))[0] for n, prompt in enumerate(PROMPTS)]
        return known[key]

    return answers


@pytest.mark.sweep_but(1)
@pytest.mark.decides
@pytest.mark.parametrize(("shifted", "options", "focus", "way"), ALL_CASES, ids=str)
def test_mixed_batches_equal_a_slow_decoder(
    toys: dict[bool, Path],
    expected: Any,
    shifted: bool,
    options: dict[str, Any],
    focus: dict[str, Any],
    way: dict[str, Any],
) -> None:
    engine = build_engine(toys[shifted], "block", accelerators={"focus": focus}, **options, **way)
    found = engine.generate(PROMPTS, params())
    assert [list(answer.token_ids) for answer in found] == expected(shifted, options, focus)
    assert {answer.exactness for answer in found} == {"lossy"}
    assert_idle(engine)


class Watch:
    """What FOCUS does in an engine: its passes over masks, and before which of each request KV was lost."""

    def __init__(self, engine: Engine, patch: pytest.MonkeyPatch) -> None:
        self.passes: list[FocusPass] = []
        self.counts: Counter[str] = Counter()
        self.losses: dict[str, list[int]] = {}
        self._engine = engine
        self._reset: set[int] = set()
        begin, reset = Focus.begin, Focus.reset

        def watched(focus: Focus, view: PassView) -> FocusPass:
            found = begin(focus, view)
            self._note(view)
            if view.is_mask_BW.any():
                self.passes.append(found)
            return found

        def watched_reset(focus: Focus, lanes: list[int]) -> None:
            reset(focus, lanes)
            self._reset |= set(lanes)

        patch.setattr(Focus, "begin", watched)
        patch.setattr(Focus, "reset", watched_reset)

    def _note(self, view: PassView) -> None:
        names = {request.lane: request.request_id for request in self._engine.scheduler.running}
        for lane, has_masks in zip(view.plan.lanes_B.tolist(), view.is_mask_BW.any(-1).tolist(), strict=True):
            if has_masks:
                name = names[lane]
                if lane in self._reset and self.counts[name]:
                    self.losses.setdefault(name, []).append(self.counts[name])
                self._reset.discard(lane)
                self.counts[name] += 1

    def stored(self) -> tuple[Tensor, Tensor]:
        """Keys and values [layers, slots, K, H] of the only sequence, in order."""
        runner, [lane] = self._engine._parts.runner, self.passes[-1].view.plan.lanes_B.tolist()
        cache, pool = runner._cache, runner.pool
        pages_P = pool.block_table_ZP[lane][: pool.num_owned(lane)]
        slots = (pages_P[:, None] * pool.page_size + torch.arange(pool.page_size)).flatten()
        return cache.keys[:, slots], cache.values[:, slots]


@pytest.mark.sweep_but(number=3, shifted=True, focus={"commit": "unfrozen"})
@pytest.mark.decides
@pytest.mark.parametrize(("shifted", "options", "focus"), CASES, ids=str)
@pytest.mark.parametrize("number", [3])
def test_passes_and_stored_keys_and_values_equal_a_slow_decoders(
    toys: dict[bool, Path],
    monkeypatch: pytest.MonkeyPatch,
    shifted: bool,
    options: dict[str, Any],
    focus: dict[str, Any],
    number: int,
) -> None:
    slow = slow_focus(toys[shifted], shifted, options, focus)
    slow.answer(PROMPTS[number], sampling(number))
    engine = build_engine(toys[shifted], "block", accelerators={"focus": focus}, **options)
    watch = Watch(engine, monkeypatch)
    engine.add_request("one", PROMPTS[number], params()[number])
    # The last pass frees the pages.
    while len(watch.passes) < len(slow.passes) - 1:
        num_before = len(watch.passes)
        engine.step()
        if len(watch.passes) == num_before:
            continue
        found, right = watch.passes[-1], slow.passes[num_before]
        assert (found.view.rows_BW[0] >= 0).nonzero()[:, 0].tolist() == list(right.selection.retained)
        assert found.budget_B is not None
        assert int(found.budget_B[0]) == right.selection.budget
        start = right.number * SIZE
        for stored, active, all_ in zip(
            watch.stored(), (right.keys, right.values), (slow.keys, slow.values), strict=True
        ):
            # Blocks before are stored in all layers.
            wanted = {(layer, slot): vector for (layer, slot), vector in all_.items() if slot < start}
            wanted |= {(layer, start + index): vector for (layer, index), vector in active.items()}
            found_XKH = torch.stack([stored[key] for key in wanted])
            torch.testing.assert_close(found_XKH, torch.stack(list(wanted.values())), atol=3e-5, rtol=1e-4)


@pytest.mark.sweep
@pytest.mark.parametrize(("shifted", "options", "focus"), [CASES[0], CASES[3]], ids=str)
def test_a_sequence_that_loses_its_pages_begins_its_block_again(
    toys: dict[bool, Path],
    monkeypatch: pytest.MonkeyPatch,
    shifted: bool,
    options: dict[str, Any],
    focus: dict[str, Any],
) -> None:
    engine = build_engine(
        toys[shifted], "block", accelerators={"focus": focus}, num_pages=26, max_num_seqs=5, **options
    )
    watch = Watch(engine, monkeypatch)
    names = [str(number) for number in range(len(PROMPTS))]
    scored = [dataclasses.replace(one, logprobs=1) for one in params()]
    found = engine.generate(PROMPTS, scored, request_ids=names)
    assert engine.scheduler.num_preemptions
    assert watch.losses
    slow = slow_focus(toys[shifted], shifted, options, focus)
    for number, answer in enumerate(found):
        right, _ = slow.answer(PROMPTS[number], sampling(number), losses=watch.losses.get(names[number], ()))
        assert list(answer.token_ids) == right
        # Tokens that are decoded again have their log-probabilities once.
        assert [token.token_id for token in answer.logprobs or ()] == right
        assert watch.counts[names[number]] == len(slow.passes)
    assert_idle(engine)


@pytest.mark.sweep
@pytest.mark.parametrize(("shifted", "options", "focus"), [CASES[0], CASES[3]], ids=str)
def test_mage_with_focus_has_the_rows_that_it_needs(
    toys: dict[bool, Path], shifted: bool, options: dict[str, Any], focus: dict[str, Any]
) -> None:
    slow = slow_focus(toys[shifted], shifted, options, focus, begins_full=True)
    both = {"focus": focus, "mage": {"k": 128}}
    found = build_engine(toys[shifted], "block", accelerators=both, **options).generate(PROMPTS, params())
    assert [list(answer.token_ids) for answer in found] == [
        slow.answer(prompt, sampling(n))[0] for n, prompt in enumerate(PROMPTS)
    ]


@pytest.mark.sweep
def test_edits_compute_whole_blocks(toys: dict[bool, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"threshold": 0.5, "edit_threshold": 0.3}
    prompts, settings = PROMPTS[:3], params()[:3]
    engine = build_engine(toys[False], "block", accelerators={"focus": {}}, **options)
    finish, num_clean = FocusPass.finish, []

    def watched(focus: FocusPass) -> None:
        finish(focus)
        is_clean_B = focus.view.is_working_B & ~focus.view.is_mask_BW.any(-1)
        num_clean.append(int(is_clean_B.sum()))
        assert (focus.view.rows_BW[is_clean_B] >= 0).all()

    monkeypatch.setattr(FocusPass, "finish", watched)
    assert all(
        len(answer.token_ids) == setting.max_tokens
        for answer, setting in zip(engine.generate(prompts, settings), settings, strict=True)
    )
    assert sum(num_clean) > len(prompts)


@pytest.mark.sweep
def test_a_frozen_token_that_is_edited_is_computed_again(
    toys: dict[bool, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is not fed has the keys and values of the token that stands there."""
    engine = build_engine(toys[False], "block", accelerators={"focus": {}}, threshold=0.5, edit_threshold=0.0)
    initial_rows, stored, num_frozen = FocusPass.initial_rows, {}, 0

    def watched(focus: FocusPass) -> RowSelection | None:
        nonlocal num_frozen
        retained, plan = initial_rows(focus), focus.view.plan
        assert retained is not None
        for b, index in (focus.view.rows_BW >= 0).nonzero().tolist():
            row = int(focus.view.rows_BW[b, index])
            key, token = (int(plan.lanes_B[b]), int(plan.slots_R[row])), int(plan.token_ids_R[row])
            if retained.keep_R[row]:
                stored[key] = token
            else:
                num_frozen += 1
                assert stored[key] == token
        return retained

    monkeypatch.setattr(FocusPass, "initial_rows", watched)
    engine.generate(PROMPTS[:4], params()[:4])
    assert num_frozen
