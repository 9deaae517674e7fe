"""Several ranks give the same answers as one, also with aborts, preemption and a tight page pool."""

from __future__ import annotations

import gc
import itertools
import random
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from idlm.contracts import Completion, SamplingParams
from idlm.errors import UserError
from idlm.infer.distributed import launcher as groups
from idlm.infer.distributed.launcher import DriverWorker, TensorParallelGroup
from idlm.infer.engine import Engine
from idlm.infer.models.base import Shards
from idlm.infer.runtime.graphs import warm_up
from idlm.infer.runtime.graphs.pass_shape import PassShape
from idlm.infer.runtime.model_runner import StepResult
from idlm.infer.settings import EngineSettings
from idlm.kernels.peer_sum import boxes
from idlm.semantics import Semantics
from tests.adapters import write_adapter
from tests.contracts.engines import (
    CYCLE,
    MASK_ID,
    acceptance_of,
    assert_idle,
    build_engine,
    clear_answers,
    greedy,
    prompts_of,
    simulate_graphs,
)
from tests.errors import ctrl_c_raises, refused
from tests.ranks import group_engine, group_of_threads, shards_of
from tests.toy import write_toy_checkpoint

TINY = Path(__file__).resolve().parents[2] / "recipes" / "assets" / "tiny_ar"
ODD_VOCABULARY = 51
AS_ON_A_GPU = {"graphs": "on", "num_inflight_steps": 3}
DECODERS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("ar", {}, {}),
    ("isd", {"stride": 2}, {}),
    ("isd", {"stride": 4, "rejection_strategy": "branch"}, AS_ON_A_GPU),
]
"""Decoder, its options, and settings of the engine of several ranks."""

CHANGED = [
    greedy(max_tokens=6),
    greedy(max_tokens=6, presence_penalty=1.5, repetition_penalty=1.2, logit_bias={3: 2.0}),
    greedy(max_tokens=6, min_tokens=3, stop_token_ids=(5,), logit_bias={5: 50.0}),
    greedy(max_tokens=6, frequency_penalty=0.5, no_repeat_ngram_size=2),
]

pytestmark = pytest.mark.filterwarnings("ignore:stride")


@pytest.fixture(scope="module")
def pair() -> Iterator[TensorParallelGroup]:
    with group_of_threads(2) as group:
        yield group


def _toy(directory: Path, architecture: str, **options: Any) -> Path:
    write_toy_checkpoint(directory, architecture=architecture, vocab_size=ODD_VOCABULARY, **options)
    Semantics(mask_token_id=MASK_ID, stride=4).save(directory)
    return directory


def _check_parity(
    group: TensorParallelGroup,
    checkpoint: Path,
    decoders: Any = DECODERS,
    *,
    mask_token_id: int | None = None,
) -> None:
    prompts = prompts_of([1, 7, 30, 5])
    for decoder, options, ways in decoders:
        both = options if decoder == "ar" else {**options, "mask_token_id": mask_token_id}
        expected = build_engine(checkpoint, decoder, **both).generate(prompts, CHANGED)
        engine = group_engine(group, checkpoint, decoder, **both, **ways)
        found = engine.generate(prompts, CHANGED)
        assert [mine.token_ids for mine in found] == [one.token_ids for one in expected], options
        assert acceptance_of(found) == acceptance_of(expected)
        _compare(engine)
        assert_idle(engine)


def _compare(engine: Engine) -> None:
    assert isinstance(engine._worker, DriverWorker)
    engine._worker.compare()


def test_greedy_answers_of_the_bundled_model(pair: TensorParallelGroup) -> None:
    """Its head is its embedding."""
    _check_parity(pair, TINY, DECODERS[::2], mask_token_id=170)


@pytest.mark.sweep
@pytest.mark.decides
@pytest.mark.parametrize("architecture", ["Qwen2"])
def test_greedy_answers_of_random_models(
    pair: TensorParallelGroup, tmp_path: Path, architecture: str
) -> None:
    """QK norm or biases, and a head of its own with an odd number of rows: the last rank has one less."""
    _check_parity(pair, _toy(tmp_path / "toy", architecture))


@pytest.mark.sweep
def test_four_ranks(tmp_path: Path) -> None:
    with group_of_threads(4) as group:
        _check_parity(group, _toy(tmp_path / "toy", "Qwen3", num_kv_heads=4), DECODERS[::2])


@pytest.mark.decides
def test_an_adapter_is_divided_like_its_base(
    pair: TensorParallelGroup, foreseeing: Path, tmp_path: Path
) -> None:
    """And so is a further one, which one of the requests has."""
    shape: dict[str, Any] = {"mask_token_id": MASK_ID, "stride": 4}
    adapter = write_adapter(tmp_path / "adapter", foreseeing, size=0.12, **shape)
    other = write_adapter(tmp_path / "other", foreseeing, size=0.3, rank=5, seed=1, **shape)
    prompts = prompts_of([1, 7, 30], vocab_size=CYCLE)
    base = clear_answers(build_engine(foreseeing, "ar"), prompts, greedy(max_tokens=16))
    one = build_engine(adapter, "isd", stride=4).generate(prompts, greedy(max_tokens=16))
    one[2:] = build_engine(other, "isd", stride=4).generate(prompts[2:], greedy(max_tokens=16))
    engine = group_engine(pair, adapter, "isd", stride=4, adapters={"other": str(other)})
    params = [greedy(max_tokens=16, adapter=name) for name in (None, None, "other")]
    found = engine.generate(prompts, params)
    assert [answer.token_ids for answer in found] == [answer.token_ids for answer in base]
    assert [answer.accepted_by_position for answer in found] == [a.accepted_by_position for a in one]
    assert 0.1 < acceptance_of(found) < 0.95


def test_draws_and_logprobs(pair: TensorParallelGroup, foreseeing: Path) -> None:
    params = [
        SamplingParams(temperature=0.9, top_p=0.95, seed=2**62 + k, max_tokens=16, logprobs=k, n=2)
        for k in range(3)
    ]
    params[2] = replace(params[2], prompt_logprobs=1)
    prompts = prompts_of([3, 9, 20], vocab_size=CYCLE)
    one = build_engine(foreseeing, "isd", stride=3).generate(prompts, params)
    engine = group_engine(pair, foreseeing, "isd", stride=3, **AS_ON_A_GPU)
    for mine, other in zip(engine.generate(prompts, params), one, strict=True):
        assert mine.token_ids == other.token_ids
        assert mine.logprobs is not None
        assert other.logprobs is not None
        pairs = [*zip(mine.logprobs, other.logprobs, strict=True)]
        assert (mine.prompt_logprobs is None) == (other.prompt_logprobs is None)
        pairs += zip((mine.prompt_logprobs or ())[1:], (other.prompt_logprobs or ())[1:], strict=True)
        for found, expected in pairs:
            assert found is not None and expected is not None
            assert found.logprob == pytest.approx(expected.logprob, abs=1e-4)


def _requests(count: int, *, draws: bool) -> list[tuple[list[int], SamplingParams]]:
    rng = random.Random(0)
    beginnings = prompts_of([5, 13, 20], seed=1, vocab_size=CYCLE)
    return [
        (
            rng.choice(beginnings) + tail,
            SamplingParams(
                temperature=rng.choice((0.0, 1.0)) * draws,
                seed=rng.randrange(2**63),
                max_tokens=rng.randint(1, 20),
            ),
        )
        for tail in prompts_of([rng.randint(1, 8) for _ in range(count)], seed=2, vocab_size=CYCLE)
    ]


@pytest.mark.sweep
@pytest.mark.parametrize("adaptive", [False, True])
def test_a_tight_pool_aborts_and_shared_beginnings(
    pair: TensorParallelGroup, foreseeing: Path, adaptive: bool
) -> None:
    """The other rank keeps no books, and still has every page where it belongs. Rank 0 alone times passes."""
    requests = _requests(28, draws=not adaptive)
    options = {"stride": 4, "adaptive": adaptive}
    tight = {"max_num_seqs": 8, "num_pages": 20, "max_length": 64}
    engine = group_engine(pair, foreseeing, "isd", **options, **tight, num_inflight_steps=2)
    finished: dict[str, Completion] = {}
    for number, (prompt, params) in enumerate(requests):
        engine.add_request(str(number), prompt, params)
    num_steps = 0
    while engine.has_work:
        for event in engine.step():
            if event.completion is not None:
                finished[event.request_id] = event.completion
        num_steps += 1
        if num_steps % 3 == 0 and engine.scheduler.running:
            engine.abort(engine.scheduler.running[num_steps % len(engine.scheduler.running)].request_id)
    _compare(engine)
    assert_idle(engine)
    assert engine.scheduler.num_preemptions > 0
    assert engine.pool.cache is not None
    assert engine.pool.cache.counts.num_hit_tokens > 0
    assert 5 < len(finished) < 28
    one = build_engine(foreseeing, "isd", **options, max_length=64).generate(*map(list, zip(*requests)))
    for request_id, found in finished.items():
        assert found.token_ids == one[int(request_id)].token_ids


def test_an_interrupt_waits_for_the_pass_and_the_ranks_stay_in_step(
    pair: TensorParallelGroup, foreseeing: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = group_engine(pair, foreseeing, "isd", stride=4)
    prompts = prompts_of([3, 20], vocab_size=CYCLE)
    expected = engine.generate(prompts, greedy(max_tokens=12))
    step, calls = type(engine._parts.step).__call__, 0

    def interrupted(self: Any, schedule: Any) -> StepResult:
        nonlocal calls
        if threading.current_thread() is threading.main_thread():
            calls += 1
            if calls == 3:
                signal.raise_signal(signal.SIGINT)
        return step(self, schedule)

    monkeypatch.setattr(type(engine._parts.step), "__call__", interrupted)
    with ctrl_c_raises(), pytest.raises(KeyboardInterrupt):
        engine.generate(prompts, greedy(max_tokens=12))
    assert calls == 3
    assert_idle(engine)
    again = engine.generate(prompts, greedy(max_tokens=12))
    assert [answer.token_ids for answer in again] == [answer.token_ids for answer in expected]
    _compare(engine)


def test_ranks_that_disagree_are_noticed(foreseeing: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "STEPS_BETWEEN_DIGESTS", 4)
    with group_of_threads(2) as group:
        engine = group_engine(group, foreseeing, "ar")
        engine.generate([[1, 2, 3]], greedy(max_tokens=10))
        engine.add_request("a", [1, 2, 3], greedy(max_tokens=10))
        engine.step()
        engine.table.tokens_ZL[engine.scheduler.running[0].lane, 1] += 1
        refused("IDLM-0429", engine.generate, [[4, 5]], greedy(max_tokens=10))
        refused("IDLM-0428", engine.generate, [[1, 2, 3]], greedy(max_tokens=10))


@pytest.mark.sweep
@pytest.mark.parametrize("is_noticed", [False, True])
def test_rank_0_is_freed_only_when_it_does_not_notice_a_loss_itself(
    is_noticed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(groups, "WATCH_INTERVAL", 0.02)
    monkeypatch.setattr(groups, "DETECTION_TIMEOUT", 0.2)
    with group_of_threads(2) as group:
        is_free = threading.Event()
        group.free_when_stuck(is_free.set)
        assert not is_free.wait(0.1), "no rank is gone"
        # A digest without an engine ends its thread and closes its connection.
        group.broadcast({"do": "digest"})
        if is_noticed:
            refused("IDLM-0426: rank 1 failed: AssertionError", group.answers)
        assert is_free.wait(0.6) != is_noticed


def test_ranks_agree_on_when_a_warm_up_stops(foreseeing: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 soon has no memory; rank 0 has."""
    prompts, enough = prompts_of([1, 7, 20, 3], vocab_size=CYCLE), itertools.count()
    warm, built = warm_up.warm_up, dict[bool, set[PassShape]]()

    def memory(device: torch.device) -> tuple[int, int]:
        is_driver = threading.current_thread() is threading.main_thread()
        return (1 << 30 if is_driver or next(enough) < 12 else 0), 1 << 30

    def noting(parts: Any, **options: Any) -> Any:
        done = warm(parts, **options)
        built[options["shards"].rank == 0] = set(parts.step._graphs)
        return done

    simulate_graphs(monkeypatch)
    monkeypatch.setattr(warm_up, "memory_bytes", memory)
    monkeypatch.setattr(warm_up, "warm_up", noting)
    monkeypatch.setattr(EngineSettings, "warms_up", True)
    expected = clear_answers(build_engine(foreseeing, "ar", graphs="off"), prompts, greedy(max_tokens=20))
    with group_of_threads(2) as group:
        engine = group_engine(group, foreseeing, "ar", graphs="on", warmup="auto", num_inflight_steps=4)
        assert built[True] == built[False] and 1 < len(built[True]) < engine._parts.warm_up.num_wanted
        found = engine.generate(prompts, greedy(max_tokens=20))
        assert [answer.token_ids for answer in found] == [answer.token_ids for answer in expected]
        assert engine.metrics()["graphs_captured_in_traffic"] == 0


def test_a_model_that_cannot_be_divided(foreseeing: Path) -> None:
    with group_of_threads(3) as group, pytest.raises(UserError, match="IDLM-0423"):
        group_engine(group, foreseeing, "ar")


def test_sums_and_gathers_have_the_same_bits_on_all_ranks(tmp_path: Path) -> None:
    """Also for sizes that rings divide unevenly."""
    for size in (2, 3):
        folder = tmp_path / str(size)
        folder.mkdir()
        found: dict[int, list[torch.Tensor]] = {}
        threads = [
            threading.Thread(target=_collect, args=(rank, size, folder, found)) for rank in range(size)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for rank in range(1, size):
            for mine, other in zip(found[rank], found[0], strict=True):
                assert torch.equal(mine, other)


class _Driver:
    """Of CUDA, whose memory of two ranks is at 16 and 17; that at `closed` opens in no other process."""

    def __init__(self, closed: int) -> None:
        self.closed, self.addresses, self.freed = closed, iter((16, 17)), list[int]()

    def cuMemAlloc_v2(self, address: Any, num_bytes: Any) -> int:
        address._obj.value = next(self.addresses)
        return 0

    def cuIpcGetMemHandle(self, handle: Any, address: Any) -> int:
        handle._obj.content[0] = address.value
        return 0

    def cuIpcOpenMemHandle_v2(self, address: Any, handle: Any, flags: int) -> int:
        is_open = handle.content[0] != self.closed
        address._obj.value = handle.content[0] * is_open
        return int(not is_open)

    def cuMemFree_v2(self, address: Any) -> None:
        self.freed.append(address.value)

    cuIpcCloseMemHandle = cuMemFree_v2


@pytest.mark.parametrize("closed", ["", "to processes", "to GPU 1"])
def test_ranks_share_memory_if_all_reach_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, closed: str
) -> None:
    driver = _Driver(17 if closed == "to processes" else 0)
    monkeypatch.setattr(boxes.ctypes, "CDLL", lambda name: driver)
    monkeypatch.setattr(boxes, "reaches_all", lambda rank, size: rank == 0 or closed != "to GPU 1")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)

    def opened(rank: int) -> boxes.PeerMemory | None:
        hosts = shards_of(rank, 2, tmp_path)
        return boxes.open_memory(rank, 2, hosts.control, torch.zeros(1, dtype=torch.int32))

    with ThreadPoolExecutor(2) as ranks:
        found = list(ranks.map(opened, range(2)))
    if closed:
        assert found == [None, None]
    else:
        assert [sorted(memory.addresses) for memory in found if memory is not None] == [[16, 17]] * 2
    del found
    gc.collect()
    assert set(driver.freed) == ({16} if closed == "to GPU 1" else {16, 17})


def _collect(rank: int, size: int, folder: Path, found: dict[int, list[torch.Tensor]]) -> None:
    shards: Shards = shards_of(rank, size, folder)
    generator = torch.Generator().manual_seed(rank)
    results = []
    for rows, columns in ((1, 1), (3, 7), (1, 4097), (257, 33)):
        results.append(shards.sum(torch.randn(rows, columns, generator=generator)))
        part = shards.part(columns)
        results.append(shards.gather(results[-1][:, part].contiguous(), columns))
        assert torch.equal(results[-1], results[-2])
    found[rank] = results
