"""Random ids in place of masks: greedy answers are AR's, each pass feeds new ids, and no answer depends on
the rest of the batch, on prompts in the cache, on replayed graphs or on preemption."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from idlm.contracts import SamplingParams
from idlm.infer.decoders.rejection import STRATEGIES
from idlm.infer.engine import Engine
from idlm.semantics import Semantics
from tests.adapters import write_adapter
from tests.contracts.engines import (
    CYCLE,
    MASK_ID,
    answers,
    assert_idle,
    build_engine,
    clear_answers,
    greedy,
    prompts_of,
    simulate_graphs,
    watch_passes,
)
from tests.errors import refused

STRIDE = 16
LOW, HIGH = 3, MASK_ID
PROMPTS = prompts_of([13, 8, 1, 5, 9, 12, 4, 17], vocab_size=CYCLE)
PARAMS = [SamplingParams(max_tokens=12, temperature=number % 3 / 2, seed=number) for number in range(8)]


@pytest.fixture(scope="module")
def adapter(toy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("adapter")
    return write_adapter(directory, toy, mask_token_id=None, noise_range=(LOW, HIGH), stride=STRIDE, size=0.2)


def _engine(adapter: Path, strategy: str = "branch_2", stride: int = 4, **options: Any) -> Engine:
    return build_engine(adapter, "isd", stride=stride, rejection_strategy=strategy, **options)


def _drawn(engine: Engine) -> list[tuple[Any, ...]]:
    found = engine.generate(PROMPTS, PARAMS)
    return [(one.token_ids, one.tested_by_position, one.accepted_by_position) for one in found]


@pytest.fixture(scope="module")
def alone(adapter: Path) -> list[tuple[Any, ...]]:
    """What an engine of one lane, without a cache, answers."""
    return _drawn(_engine(adapter, max_num_seqs=1, prefix_cache=False))


@pytest.mark.sweep_but("branch-16")
@pytest.mark.decides
@pytest.mark.parametrize(
    ("strategy", "stride"),
    [("branch", STRIDE), ("branch_3", STRIDE), *((name, 3) for name in STRATEGIES.names())],
)
def test_greedy_answers_are_the_bases(toy: Path, adapter: Path, strategy: str, stride: int) -> None:
    expected = clear_answers(build_engine(toy, "ar"), PROMPTS, greedy(max_tokens=10))
    engine = _engine(adapter, strategy, stride)
    assert answers(engine.generate(PROMPTS, greedy(max_tokens=10))) == answers(expected)
    assert_idle(engine)


def _mask_ids(passes: list[Any]) -> list[Tensor]:
    found = []
    for plan, _ in passes:
        if plan.is_mask_R.any():
            found.append(plan.token_ids_R[plan.is_mask_R])
            known_R = plan.token_ids_R[~plan.is_mask_R]
            assert bool((known_R < MASK_ID + 1).all())
    return found


def test_every_pass_feeds_new_ids_of_the_range(adapter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = _engine(adapter, "branch", STRIDE, max_num_batched_tokens=64)
    passes = watch_passes(engine, monkeypatch)
    engine.generate([PROMPTS[0]], SamplingParams(max_tokens=12, seed=5))
    ids = _mask_ids(passes)
    together = torch.cat(ids)
    assert int(together.min()) == LOW and int(together.max()) == HIGH - 1
    assert len(together.unique()) == HIGH - LOW
    counts = together.bincount(minlength=HIGH)[LOW:].double()
    assert float(counts.std() / counts.mean()) < 0.5
    firsts = [one[: STRIDE - 1].tolist() for one in ids]
    assert len({tuple(one) for one in firsts}) == len(firsts) > 3


@pytest.mark.parametrize(
    "options",
    [{}, {"max_num_seqs": 7}, {"num_pages": 24, "max_num_seqs": 8}, {"num_inflight_steps": 3}],
    ids=str,
)
def test_answers_are_those_of_requests_alone(
    adapter: Path, alone: list[tuple[Any, ...]], options: dict[str, Any]
) -> None:
    """Eight and seven at once, with few pages, and with results that are read late."""
    engine = _engine(adapter, **options)
    assert _drawn(engine) == alone
    assert ("num_pages" in options) == (engine.scheduler.num_preemptions > 0)


def test_prompts_in_the_cache_but_for_one_token(adapter: Path, alone: list[tuple[Any, ...]]) -> None:
    """The one token that is left to compute is followed by rows of random ids, not by padding as drafts."""
    engine = _engine(adapter)
    for _ in range(2):
        assert _drawn(engine) == alone
    again = engine.generate([PROMPTS[0], PROMPTS[4]], [PARAMS[0], PARAMS[4]])
    assert [one.num_prompt_tokens - one.num_cached_tokens for one in again] == [1, 1]
    assert [one.token_ids for one in again] == [alone[0][0], alone[4][0]]


def test_a_replayed_graph_feeds_new_ids(
    adapter: Path, alone: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    simulate_graphs(monkeypatch)
    engine = _engine(adapter, graphs="on")
    assert _drawn(engine) == alone


def test_noise_and_a_mask_exclude_each_other(toy: Path, adapter: Path, tmp_path: Path) -> None:
    """A given mask id, a tensor of it in the adapter, a range outside the embedding, other decoders."""
    both = "IDLM-0304: noise_range and mask_token_id=5 exclude"
    refused(both, build_engine, adapter, "isd", mask_token_id=5)
    settings = {"mask_token_id": None, "noise_range": (0, 9), "stride": 4}
    own = write_adapter(tmp_path / "own", toy, has_mask_row=True, **settings)
    refused(r"IDLM-0606: idlm_config.json has noise_range=\[0, 9\]", build_engine, own, "isd")
    far = write_adapter(tmp_path / "far", toy, **{**settings, "noise_range": (0, 10_000)})
    refused("embedding rows", build_engine, far, "isd")
    for decoder in ("block", "full"):
        refused("IDLM-0450", build_engine, adapter, decoder)
    for wrong in ((3,), (5, 5), (-1, 4), (0, 1 << 40)):
        refused("noise_range", Semantics, noise_range=wrong, stride=2)
    for causality in ({"causality": "full"}, {"causality": "block", "block_size": 4}):
        refused("needs a mask_token_id, not a noise_range", Semantics, noise_range=(0, 4), **causality)


def test_the_file_names_the_range_only_where_there_is_one(tmp_path: Path) -> None:
    for meaning in (Semantics(noise_range=(1, 9), stride=4), Semantics(mask_token_id=3, stride=4)):
        meaning.save(tmp_path)
        assert Semantics.load(tmp_path) == meaning
        assert ("noise_range" in (tmp_path / "idlm_config.json").read_text()) == bool(meaning.noise_range)
    assert [one.draft_input for one in (meaning, Semantics(noise_range=(1, 9)), Semantics())] == [
        "mask",
        "uniform",
        None,
    ]
