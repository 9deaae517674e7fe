"""Accelerators on a GPU against the CPU, where tests/contracts compares them with slow references; at full
budget against exact attention in bf16 by the engine's kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from idlm.infer.accelerators import prefix
from idlm.infer.sparse.accelerator import ACCELERATORS
from idlm.semantics import Semantics
from tests.contracts.accelerators.cases import PARAMS, PROMPTS, STACKS, STRATEGY, exactly, thinly
from tests.contracts.engines import MASK_ID, assert_idle, build_engine, clear_answers, greedy, watch_passes
from tests.toy import write_toy_checkpoint

SIZE = 32


def checkpoint(directory: Path, *, shifted: bool) -> Path:
    architecture = "Qwen2" if shifted else "Qwen3"
    write_toy_checkpoint(directory, architecture=architecture, sharpness=6.0, num_layers=4)
    Semantics(causality="block", logit_shift=shifted, block_size=SIZE, mask_token_id=MASK_ID).save(directory)
    return directory


CASES = [(stack, False) for stack in STACKS] + [(STACKS[-1], True), (("mage",), True)]


@pytest.mark.parametrize(("stack", "shifted"), CASES, ids=lambda value: str(value))
def test_sparse_answers_equal_those_of_a_cpu(tmp_path: Path, stack: tuple[str, ...], shifted: bool) -> None:
    directory = checkpoint(tmp_path, shifted=shifted)
    settings: dict[str, Any] = {**STRATEGY, "accelerators": thinly(stack), "page_size": 16}
    expected = clear_answers(build_engine(directory, "block", **settings), PROMPTS, PARAMS)
    ways: list[dict[str, Any]] = [{}, {"num_pages": 18, "max_num_seqs": 4}, {"graphs": "off"}]
    for way in ways:
        engine = build_engine(directory, "block", device="cuda", **settings, **way)
        assert engine.settings.graphs == way.get("graphs", "on")
        found = engine.generate(PROMPTS, PARAMS)
        assert [one.token_ids for one in found] == [one.token_ids for one in expected]
        assert_idle(engine)


@pytest.mark.parametrize("stack", [("mage",), STACKS[-1]], ids="+".join)
def test_passes_that_copy_the_rows_of_blocks_answer_the_same(
    tmp_path: Path, stack: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As passes with many rows of prompts do, here in graphs and in each pass."""
    directory = checkpoint(tmp_path, shifted=False)
    settings: dict[str, Any] = {**STRATEGY, "accelerators": thinly(stack), "page_size": 16}
    expected = clear_answers(build_engine(directory, "block", **settings), PROMPTS, PARAMS)
    monkeypatch.setattr(prefix, "STORED_ROWS", 0)
    for graphs in ("on", "off"):
        engine = build_engine(directory, "block", device="cuda", graphs=graphs, **settings)
        found = engine.generate(PROMPTS, PARAMS)
        assert [one.token_ids for one in found] == [one.token_ids for one in expected]
        assert_idle(engine)


@pytest.mark.parametrize(
    ("stack", "kv_cache"), [(stack, "auto" if len(stack) == 1 else "fp8") for stack in STACKS], ids=str
)
def test_logits_at_full_budget_are_those_of_exact_attention(
    tmp_path: Path, stack: tuple[str, ...], kv_cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first passes over a block after a prompt: the same inputs to sparse and to exact attention."""
    directory = checkpoint(tmp_path, shifted=False)
    logits = []
    for accelerators in ({}, exactly(stack)):
        engine = build_engine(
            directory,
            "block",
            device="cuda",
            dtype="bfloat16",
            kv_cache=kv_cache,
            graphs="off",
            page_size=16,
            max_num_batched_tokens=256,
            strategy="sequential",
            accelerators=accelerators,
        )
        passes = watch_passes(engine, monkeypatch)
        engine.generate([PROMPTS[4]], greedy(max_tokens=6))
        logits.append(torch.cat([logits_XV[:, :MASK_ID].float() for _, logits_XV in passes[:5]]))
    error, size = (logits[0] - logits[1]).square().mean().sqrt(), logits[0].square().mean().sqrt()
    assert float(error / size) < 0.02


def test_every_accelerator_is_tried() -> None:
    assert {name for stack in STACKS for name in stack} == set(ACCELERATORS.names())
