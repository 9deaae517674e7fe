"""Logits that are not finite: their request ends with an error and what it had, the others never notice.

tests/gpu/engine/test_nonfinite_gpu.py runs the same where passes are graphs."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from idlm.contracts import SamplingParams
from idlm.errors import UserError
from idlm.infer.engine import Engine
from idlm.kernels import backend as library
from idlm.kernels.backend import library_linear
from tests.contracts.block.blocks import write_block_toy
from tests.contracts.engines import (
    MASK_ID,
    assert_idle,
    build_engine,
    drain,
    prompts_of,
    wanted_of,
    write_converted_toy,
)
from tests.errors import refused

DECODERS: list[tuple[str, dict[str, Any]]] = [
    ("ar", {}),
    ("isd", {"stride": 4, "rejection_strategy": "branch"}),
    ("isd", {"stride": 3, "rejection_strategy": "tree"}),
    ("block", {}),
    ("block", {"dual_cache": True, "sub_block_size": 2}),
    ("block", {"mode": "quality"}),
]
WAYS: list[dict[str, Any]] = [{}, {"graphs": "on", "num_inflight_steps": 2}]
SAMPLING = [
    SamplingParams(temperature=0, ignore_eos=True, max_tokens=14),
    SamplingParams(temperature=0.8, top_k=3, top_p=0.9, ignore_eos=True, max_tokens=14, seed=3),
]
BAD = 46
"""A token whose embedding overflows. Its logit is 0, far from the best three of 48."""
LENGTHS = (3, 22, 9, 13)
PLAIN_PRODUCT = library._product


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """By whether they are block-causal."""
    folder = tmp_path_factory.mktemp("toys")
    return {
        False: write_converted_toy(folder / "causal"),
        True: write_block_toy(folder / "block", shifted=False),
    }


def _engine(checkpoints: dict[bool, Path], decoder: str, **options: Any) -> Engine:
    engine = build_engine(checkpoints[decoder == "block"], decoder, max_num_seqs=4, **options)
    engine._parts.model.trunk.head.data[BAD] = 0
    return engine


def _prompts() -> list[list[int]]:
    return prompts_of(LENGTHS, vocab_size=BAD)


def _spoil(engine: Engine, token_id: int) -> None:
    """Every sequence that sees the token has no finite logits from then on."""
    engine._parts.model.trunk.embed.data[token_id] = torch.inf


@pytest.mark.sweep_but(options={"stride": 3, "rejection_strategy": "tree"})
@pytest.mark.parametrize(
    ("decoder", "options", "way"),
    [(*one, way) for one, way in zip(DECODERS, itertools.cycle(WAYS), strict=False)],
)
def test_only_sequences_that_see_an_overflow_end_with_an_error(
    checkpoints: dict[bool, Path], decoder: str, options: dict[str, Any], way: dict[str, Any]
) -> None:
    engine = _engine(checkpoints, decoder, **options, **way)
    for params in SAMPLING:
        expected = engine.generate(_prompts(), params)
        embedding = engine._parts.model.trunk.embed.data[BAD].clone()
        _spoil(engine, BAD)
        for index, prompt in enumerate(_prompts()):
            engine.add_request(str(index), [*prompt[:-1], BAD, prompt[-1]] if index % 2 else prompt, params)
        found = drain(engine)
        for index, answer in enumerate(expected):
            if index % 2 == 0:
                assert found[str(index)].token_ids == answer.token_ids
                assert found[str(index)].error is None
                continue
            assert found[str(index)].finish_reason == "error"
            assert found[str(index)].token_ids == ()
            assert str(found[str(index)].error).startswith("IDLM-0457")
        assert_idle(engine)
        engine._parts.model.trunk.embed.data[BAD] = embedding


def product_on_amx(x_RD: Tensor, weight_ED: Tensor, *others: Tensor | None, tile: int = 32) -> Tensor:
    """The last tile of a row takes the beginning of what follows in memory, and multiplies it by zero."""
    y_RE = PLAIN_PRODUCT(x_RD, weight_ED, *others)
    if (missing := -x_RD.shape[1] % tile) and x_RD.dtype == torch.bfloat16:
        memory = torch.empty(0, dtype=x_RD.dtype).set_(x_RD.untyped_storage())
        for row in range(len(x_RD) - 1):
            end = x_RD.storage_offset() + row * x_RD.stride(0) + x_RD.shape[1]
            y_RE[row] += 0 * memory[end : end + missing].sum()
    return y_RE


@pytest.mark.parametrize("width", [64, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_row_that_is_not_finite_changes_no_other(
    monkeypatch: pytest.MonkeyPatch, width: int, dtype: torch.dtype, value: float
) -> None:
    """One element is enough; a NaN may also lie in gaps between rows."""
    generator = torch.Generator().manual_seed(0)
    memory = torch.full((17, width + 5), torch.nan, dtype=dtype)
    x, weight = memory[:, :width], torch.randn(64, width, generator=generator).to(dtype)
    x.copy_(torch.randn(17, width, generator=generator))
    if dtype == torch.float32:
        x = x.contiguous()
    expected = library_linear(x, weight)
    x[16, 0] = x[3, 0] = x[3, width - 1] = value
    others = torch.arange(17).remainder(13) != 3
    monkeypatch.setattr(library, "_product", product_on_amx)
    for out in (None, torch.empty(17, 64, dtype=dtype)):
        found = library_linear(x, weight, out_RE=out)
        assert out is None or found is out
        torch.testing.assert_close(found[others], expected[others])
        assert not found[~others].isfinite().any()


@pytest.mark.parametrize(("decoder", "options"), DECODERS[1:])
def test_masks_that_overflow_are_reported_and_not_drawn_from(
    checkpoints: dict[bool, Path], decoder: str, options: dict[str, Any]
) -> None:
    engine = _engine(checkpoints, decoder, **options)
    _spoil(engine, MASK_ID)
    for params in SAMPLING:
        refused(r"IDLM-0457.*after 0 tokens.*not finite", engine.generate, _prompts(), params)
        assert_idle(engine)


@pytest.mark.sweep_but(kind=torch.inf, options={"stride": 3, "rejection_strategy": "tree"})
@pytest.mark.parametrize(("decoder", "options"), DECODERS)
@pytest.mark.parametrize("kind", [torch.inf])
def test_an_answer_keeps_what_came_before(
    checkpoints: dict[bool, Path],
    decoder: str,
    options: dict[str, Any],
    kind: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One logit of one row is enough, drafts' rows included; streamed text and the answer's are the same."""
    engine = _engine(checkpoints, decoder, **options, prefix_cache=False)
    [expected] = engine.generate(_prompts()[:1], SAMPLING[1])
    forward, passes = engine._parts.runner.forward, [0]

    def spoiled(plan: Any) -> Any:
        wanted = forward(plan)
        passes[0] += 1
        if passes[0] == expected.num_forwards - 1:
            logits_XV = wanted.logits().clone()
            logits_XV[:, 5] = kind
            return wanted_of(logits_XV, wanted.dropped)
        return wanted

    monkeypatch.setattr(engine._parts.runner, "forward", spoiled)
    tokens: list[int] = []
    with pytest.raises(UserError, match="IDLM-0457") as caught:
        for event in engine.stream(_prompts()[0], SAMPLING[1]):
            tokens += event.token_ids
    assert f"after {len(tokens)} tokens" in str(caught.value)
    assert 0 < len(tokens) < len(expected.token_ids)
    assert tuple(tokens) == expected.token_ids[: len(tokens)]
    assert_idle(engine)


@pytest.mark.sweep_but(decoder="ar")
@pytest.mark.parametrize(("decoder", "options"), DECODERS[:4])
def test_pages_of_a_failed_request_are_not_shared(
    checkpoints: dict[bool, Path], decoder: str, options: dict[str, Any]
) -> None:
    engine = _engine(checkpoints, decoder, **options)
    prompts = [prompts_of([24], vocab_size=BAD)[0], prompts_of([18], seed=1, vocab_size=BAD)[0]]
    prompts[0][6] = BAD
    expected = engine.generate(prompts, SAMPLING[0])
    assert engine.pool.cache is not None
    engine.pool.cache.clear()
    engine.pool.reset()
    embedding = engine._parts.model.trunk.embed.data[BAD].clone()
    _spoil(engine, BAD)
    for number, prompt in enumerate((*prompts, prompts[0])):
        engine.add_request(str(number), prompt, SAMPLING[0])
    found = drain(engine)
    assert [found[str(n)].finish_reason for n in range(3)] == ["error", "length", "error"]
    engine._parts.model.trunk.embed.data[BAD] = embedding
    assert_idle(engine)
    again = engine.generate(prompts, SAMPLING[0])
    assert [answer.token_ids for answer in again] == [answer.token_ids for answer in expected]
    assert again[0].num_cached_tokens == 0
    assert again[1].num_cached_tokens > 0


def test_an_answer_that_is_whole_needs_no_further_drafts(
    checkpoints: dict[bool, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the pass has emitted stands, whatever its drafts' rows hold."""
    engine = _engine(checkpoints, "isd", stride=4, prefix_cache=False)
    prompts = _prompts()[:1]
    [expected] = engine.generate(prompts, SAMPLING[1])
    forward, passes = engine._parts.runner.forward, [0]

    def spoiled_from(first: int) -> Any:
        passes[0] = 0

        def spoiled(plan: Any) -> Any:
            wanted = forward(plan)
            passes[0] += 1
            if passes[0] >= first:
                is_mask_X = plan.is_mask_R[plan.logit_rows_X]
                return wanted_of(wanted.logits().masked_fill(is_mask_X[:, None], torch.nan))
            return wanted

        return spoiled

    num_passes = expected.num_forwards
    monkeypatch.setattr(engine._parts.runner, "forward", spoiled_from(num_passes))
    [found] = engine.generate(prompts, SAMPLING[1])
    assert (found.token_ids, found.error) == (expected.token_ids, None)
    monkeypatch.setattr(engine._parts.runner, "forward", spoiled_from(num_passes - 2))
    engine.add_request("one", prompts[0], SAMPLING[1])
    cut = drain(engine)["one"]
    assert cut.finish_reason == "error"
    assert 0 < len(cut.token_ids) < len(expected.token_ids)
    assert cut.token_ids == expected.token_ids[: len(cut.token_ids)]
    assert f"after {len(cut.token_ids)} tokens" in str(cut.error)
    assert_idle(engine)
