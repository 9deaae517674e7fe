"""What decoder `block` can be told beside its strategy: edits, the dual cache and options of single requests,
against the slow decoder."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import Any

import pytest

from idlm.contracts import Completion, SamplingParams
from idlm.errors import UserError
from idlm.infer.cli.generate import generate
from idlm.infer.engine import Engine
from tests.block_reference import Sampling
from tests.contracts.block.blocks import PROMPTS, SETTINGS, Slow, assert_answers, params_of
from tests.contracts.engines import assert_idle, build_engine, prompts_of, watch_passes
from tests.errors import refused
from tests.integration.inference.command_lines import read_lines, write_lines
from tests.ranks import group_engine, group_of_threads

SIZE, PART = 8, 4
WAYS: list[dict[str, Any]] = [
    {"graphs": "on", "num_inflight_steps": 3},
    {"num_pages": 9, "max_num_seqs": 6, "num_inflight_steps": 2},
    {"fused_commit": False, "prefix_cache": False, "max_num_seqs": 3},
]
EDITS: list[dict[str, Any]] = [
    {"mode": "quality"},
    {"mode": "speed", "max_edit_passes": 3},
    {"threshold": 0.4, "edit_threshold": 0.2, "sub_block_size": PART},
]
REUSES: list[dict[str, Any]] = [
    {"threshold": 0.5},
    {"strategy": "low_confidence_static", "steps": 5},
    {"strategy": "entropy_bounded", "entropy_bound": 1.5},
]


def build_block(directory: Path, **options: Any) -> Engine:
    return build_engine(directory, "block", page_size=SIZE, **options)


def ids_of(answers: list[Completion]) -> list[list[int]]:
    return [list(answer.token_ids) for answer in answers]


def compare(engine: Engine, slow: Slow, options: dict[str, Any], without: dict[str, Any]) -> None:
    """The engine answers as the slow decoder does with `options`, which `without` them answers otherwise."""
    shifted = engine.semantics.logit_shift
    expected = slow.answers(options, shifted=shifted)
    assert expected != slow.answers(without, shifted=shifted)
    found = engine.generate(PROMPTS, params_of(scored=True))
    assert_answers(found, expected)
    assert {answer.exactness for answer in found} == {"lossy" if "dual_cache" in options else "exact"}
    assert_idle(engine)


@pytest.mark.sweep_but(1)
@pytest.mark.decides
@pytest.mark.parametrize(
    ("options", "shifted", "way"),
    [*((EDITS[0], False, way) for way in WAYS), (EDITS[1], False, WAYS[1]), (EDITS[2], True, WAYS[-1])],
    ids=str,
)
def test_edits_equal_a_slow_decoder(
    toys: dict[bool, Path],
    slow: Slow,
    options: dict[str, Any],
    shifted: bool,
    way: dict[str, Any],
) -> None:
    without = {**options, "edit_threshold": 1.0}
    compare(build_block(toys[shifted], **options, **way), slow, options, without)


def test_edits_change_answers_and_never_a_prompt(
    toys: dict[bool, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every prompt ends inside a block, and every token of the block is rewritten where it can be."""
    prompts = prompts_of((SIZE - 1, SIZE + 3, 1), seed=3)
    params = SamplingParams(temperature=0, max_tokens=2 * SIZE, ignore_eos=True)
    plain = build_block(toys[False], threshold=0.0).generate(prompts, params)
    engine = build_block(toys[False], threshold=0.0, edit_threshold=0.0)
    passes, fed = watch_passes(engine, monkeypatch), list[tuple[int, int, int]]()
    edited = engine.generate(prompts, params)
    for plan, _ in passes:
        rows = zip(plan.sequence_R.tolist(), plan.slots_R.tolist(), plan.token_ids_R.tolist(), strict=True)
        fed += ((int(plan.lanes_B[sequence]), slot, token) for sequence, slot, token in rows)
    assert ids_of(edited) != ids_of(plain)
    lanes = {lane for lane, _, _ in fed}
    assert len(lanes) == len(prompts)
    for lane, prompt in zip(sorted(lanes), prompts, strict=True):
        assert {(s, t) for owner, s, t in fed if owner == lane and s < len(prompt)} == set(enumerate(prompt))


def test_passes_of_edits_are_those_that_are_needed(toys: dict[bool, Path], slow: Slow) -> None:
    engine = build_block(toys[False], max_num_batched_tokens=64, **EDITS[1])
    for prompt, params, expected in [*zip(PROMPTS, params_of(), slow.answers(EDITS[1]), strict=True)][::3]:
        [found] = engine.generate([prompt], params)
        assert_answers([found], [expected])
        assert found.num_forwards == expected.num_passes


@pytest.mark.sweep_but(1)
@pytest.mark.decides
@pytest.mark.parametrize("way", WAYS[:2], ids=str)
@pytest.mark.parametrize(
    ("options", "shifted"), [(REUSES[0], True), (REUSES[1], True), (REUSES[2], True), (REUSES[0], False)]
)
def test_a_dual_cache_equals_a_slow_one(
    toys: dict[bool, Path],
    slow: Slow,
    options: dict[str, Any],
    shifted: bool,
    way: dict[str, Any],
) -> None:
    options = {**options, "sub_block_size": PART}
    reusing = {**options, "dual_cache": True}
    compare(build_block(toys[shifted], **reusing, **way), slow, reusing, options)


def test_a_dual_cache_computes_no_rows_but_those_of_the_part(
    toys: dict[bool, Path], slow: Slow, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"sub_block_size": PART, "dual_cache": True, "threshold": 1.0}
    prompt, sampling = PROMPTS[5], Sampling(temperature=0, max_tokens=2 * SIZE)
    expected = slow.answer(options, prompt, sampling, shifted=True)
    engine = build_block(toys[True], max_num_batched_tokens=64, **options)
    passes = watch_passes(engine, monkeypatch)
    [found] = engine.generate([prompt], SamplingParams(temperature=0, max_tokens=2 * SIZE, ignore_eos=True))
    assert_answers([found], [expected])
    # What is denoised, and every block but the last once more when it is stored.
    num_rows = sum(int(plan.cu_rows_B1[-1]) for plan, _ in passes)
    assert num_rows == expected.num_rows + (len(prompt) + len(found.token_ids) - 1) // SIZE * SIZE


def mixed_params() -> tuple[list[SamplingParams], list[dict[str, Any]]]:
    options: list[dict[str, Any]] = [
        {},
        {"threshold": 0.3},
        {"threshold": 1},
        {"edit_threshold": 0.1},
        {"edit_threshold": 1.0, "threshold": 0.6},
        {"steps": 2},
        {"steps": 3, "threshold": 0.95, "edit_threshold": 0.45},
        {"edit_threshold": 0.9},
    ]
    params = [
        dataclasses.replace(one, decoder_options=mine) for one, mine in zip(params_of(), options, strict=True)
    ]
    return params, options


@pytest.mark.sweep
@pytest.mark.decides
@pytest.mark.parametrize("way", [WAYS[1], {"num_ranks": 2, **WAYS[0]}], ids=str)
def test_requests_have_options_of_their_own(toys: dict[bool, Path], slow: Slow, way: dict[str, Any]) -> None:
    """On every rank."""
    params, options = mixed_params()
    with contextlib.ExitStack() as stack:
        if "num_ranks" in way:
            group = stack.enter_context(group_of_threads(2))
            engine = group_engine(group, toys[False], "block", mode="quality", **WAYS[0])
        else:
            engine = build_block(toys[False], mode="quality", **way)
        found = engine.generate(PROMPTS, params)
        assert_idle(engine)
        engine.close()
    expected = [
        slow.answer({"mode": "quality", **mine}, PROMPTS[number], Sampling(seed=number, **SETTINGS[number]))
        for number, mine in enumerate(options)
    ]
    assert_answers(found, expected)


def test_lines_of_a_file_have_options_of_their_own(
    toys: dict[bool, Path], slow: Slow, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sent: list[dict[str, Any]] = [{}, {"threshold": 0.3}, {"steps": 2}]
    lines = [
        {"prompt_ids": PROMPTS[0], "sampling": {"decoder_options": mine} if mine else {}} for mine in sent
    ]
    source = write_lines(tmp_path / "in.jsonl", lines)
    output = tmp_path / "out.jsonl"
    common = [f"model={toys[False]}", "device=cpu", "dtype=float32", "max_length=64", f"input={source}"]
    common += ["sampling.temperature=0", "sampling.max_tokens=12", "sampling.ignore_eos=true"]
    assert generate([*common, f"output={output}", "sampling.decoder_options.threshold=0.6"]) == 0
    given = ({"threshold": 0.6}, *sent[1:])
    expected = [slow.answer(mine, PROMPTS[0], Sampling(temperature=0)).token_ids for mine in given]
    assert [record["token_ids"] for record in read_lines(output)] == expected
    write_lines(source, [{"prompt_ids": PROMPTS[0], "sampling": {"decoder_options": {"treshold": 1}}}])
    with pytest.raises(UserError, match=r"in\.jsonl:1: decoder_options\.treshold") as caught:
        generate([*common, f"output={tmp_path / 'none.jsonl'}"])
    assert caught.value.code == "IDLM-0453"


@pytest.mark.decides
def test_entropy_bounds_of_requests(toys: dict[bool, Path], slow: Slow) -> None:
    engine = build_block(toys[False], strategy="entropy_bounded", max_num_batched_tokens=64)
    passes = []
    for bound in (0.0, 4.0, 100.0):
        params = SamplingParams(
            temperature=0, max_tokens=2 * SIZE, ignore_eos=True, decoder_options={"entropy_bound": bound}
        )
        [found] = engine.generate([PROMPTS[0]], params)
        options = {"strategy": "entropy_bounded", "entropy_bound": bound}
        expected = slow.answer(options, PROMPTS[0], Sampling(temperature=0, max_tokens=2 * SIZE))
        assert_answers([found], [expected])
        assert found.num_forwards == expected.num_passes
        passes.append(found.num_forwards)
    assert sorted(passes, reverse=True) == passes and len(set(passes)) == 3


@pytest.mark.parametrize(
    ("built", "options", "words"),
    [
        ({}, {"treshold": 0.5}, ("decoder_options.treshold", "did you mean", "threshold")),
        ({}, {"strategy": "sequential"}, ("decoder_options.strategy", "block", "threshold")),
        ({}, {"threshold": 1.5}, ("threshold=1.5", "[0, 1]")),
        ({}, {"steps": SIZE + 1}, ("steps=9", f"[1, {SIZE}]")),
        ({}, {"edit_threshold": 0.5}, ("edit_threshold=0.5", "no edits", "decoder.mode=quality")),
        (
            {"dual_cache": True, "sub_block_size": PART},
            {"edit_threshold": 0.5},
            ("dual_cache=true", "edits"),
        ),
    ],
)
def test_options_that_a_request_cannot_have_are_refused(
    toys: dict[bool, Path], built: dict[str, Any], options: dict[str, Any], words: tuple[str, ...]
) -> None:
    engine = build_block(toys[False], **built)
    with pytest.raises(UserError) as caught:
        engine.generate([[1, 2], [3]], [SamplingParams(), SamplingParams(decoder_options=options)])
    assert caught.value.code == "IDLM-0453"
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert_idle(engine)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mode": "fast"}, "quality"),
        ({"mode": "speed", "max_edit_passes": 0}, "max_edit_passes=0"),
        ({"dual_cache": True}, "sub_block_size"),
        ({"dual_cache": True, "sub_block_size": SIZE}, "sub_block_size"),
        ({"dual_cache": True, "sub_block_size": PART, "mode": "quality"}, "edits"),
    ],
    ids=str,
)
def test_options_at_odds_are_refused(toys: dict[bool, Path], options: dict[str, Any], words: str) -> None:
    error = refused(words, build_block, toys[False], **options)
    assert error.code in ("IDLM-0451", "IDLM-0416")
