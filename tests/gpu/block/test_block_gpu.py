"""Decoder `block` in CUDA graphs against the CPU, which tests/contracts compares with a slow reference."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from idlm.contracts import Completion, SamplingParams
from idlm.infer.decoders.block_config import UNMASKINGS
from idlm.infer.request import Request
from idlm.infer.runtime.graphs import pass_shape
from tests.contracts.block.blocks import LENGTHS, PROMPTS, params_of, write_block_toy
from tests.contracts.engines import (
    MASK_ID,
    assert_idle,
    build_engine,
    clear_answers,
    prompts_of,
    write_converted_toy,
)
from tests.margins import NearTie

WAYS: list[dict[str, Any]] = [{"graphs": "off"}, {}, {"max_num_seqs": 3}, {"fused_commit": False}]


OPTIONS: list[dict[str, Any]] = [
    {"mode": "quality", "sub_block_size": 8},
    {"mode": "speed", "max_edit_passes": 3},
    {"threshold": 0.5, "sub_block_size": 8, "dual_cache": True},
]


def clear_case(
    directory: Path, options: dict[str, Any]
) -> tuple[list[list[int]], list[SamplingParams], list[Completion]]:
    """The first prompts at which no choice is a near tie, requests with options of their own, answers."""
    own = [{"threshold": 0.23 + number / 10, "steps": 1 + 4 * number} for number in range(len(LENGTHS))]
    params = [replace(one, decoder_options=mine) for one, mine in zip(params_of(), own, strict=True)]
    for seed in range(40):
        prompts = prompts_of(LENGTHS, vocab_size=MASK_ID, seed=seed)
        try:
            return (
                prompts,
                params,
                clear_answers(build_engine(directory, "block", **options), prompts, params),
            )
        except NearTie:
            continue
    raise AssertionError("all prompts have a near tie")


@pytest.mark.parametrize(
    ("shifted", "options", "way"),
    [
        *((False, options, way) for options, way in zip(OPTIONS, WAYS[1:], strict=True)),
        *((True, options, way) for options, way in zip(OPTIONS, WAYS, strict=False)),
    ],
    ids=str,
)
def test_edits_parts_and_options_of_requests_give_the_tokens_of_a_cpu(
    tmp_path: Path, shifted: bool, options: dict[str, Any], way: dict[str, Any]
) -> None:
    directory = write_block_toy(tmp_path, shifted=shifted, size=32)
    common = {**options, "page_size": 32}
    prompts, params, expected = clear_case(directory, common)
    engine = build_engine(directory, "block", device="cuda", **common, **way)
    found = engine.generate(prompts, params)
    assert [answer.token_ids for answer in found] == [answer.token_ids for answer in expected]
    assert_idle(engine)


@pytest.mark.parametrize(
    ("strategy", "size", "shifted", "way"),
    [
        *((strategy, 4, True, {}) for strategy in UNMASKINGS.names()),
        *((strategy, 32, False, way) for strategy, way in zip(UNMASKINGS.names(), WAYS, strict=True)),
        *(("low_confidence_dynamic", 4, False, way) for way in WAYS),
    ],
    ids=str,
)
def test_graphs_give_the_tokens_of_a_cpu(
    tmp_path: Path, size: int, shifted: bool, strategy: str, way: dict[str, Any]
) -> None:
    directory = write_block_toy(tmp_path, shifted=shifted, size=size)
    options = {"strategy": strategy, "threshold": 0.5, "entropy_bound": 1.5}
    expected = clear_answers(build_engine(directory, "block", **options), PROMPTS, params_of())
    engine = build_engine(directory, "block", device="cuda", **options, **way)
    found = engine.generate(PROMPTS, params_of())
    assert [answer.token_ids for answer in found] == [answer.token_ids for answer in expected]
    assert_idle(engine)


@pytest.mark.parametrize("shifted", [False, True])
def test_sequences_that_wait_for_the_head_get_the_same_tokens(
    tmp_path: Path, shifted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = write_block_toy(tmp_path, shifted=shifted, size=32)
    options = {"strategy": "low_confidence_dynamic", "threshold": 0.5, "page_size": 32}
    expected = clear_answers(build_engine(directory, "block", **options), PROMPTS, params_of())
    for num_wanted in (0, 80):
        monkeypatch.setattr(pass_shape, "head_bucket", lambda *_, num=num_wanted: num)
        engine = build_engine(directory, "block", device="cuda", **options)
        found = engine.generate(PROMPTS, params_of())
        assert [answer.token_ids for answer in found] == [answer.token_ids for answer in expected]
        assert_idle(engine)


@pytest.mark.parametrize("decoder", ["block", "isd"])
def test_admission_does_not_wait_for_steps_in_progress(tmp_path: Path, decoder: str) -> None:
    """Indices from a list would be copied to the device by a call that waits for the device."""
    directory = tmp_path / "toy"
    directory.mkdir()
    if decoder == "block":
        write_block_toy(directory, shifted=False)
    else:
        write_converted_toy(directory)
    engine = build_engine(directory, decoder, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        params = SamplingParams(seed=1)
        engine.table.admit(
            [
                Request(
                    request_id="r",
                    index=0,
                    lane=lane,
                    prompt_ids=prompt_ids,
                    params=params,
                    stop_ids=frozenset(),
                    max_length=9,
                )
                for lane, prompt_ids in ((0, [1, 2]), (2, [3]))
            ]
        )
        engine.decoder.admit([0, 2], [params] * 2)
        engine.table.rewind(2)
        engine.decoder.rewind([2])
    finally:
        torch.cuda.set_sync_debug_mode("default")
