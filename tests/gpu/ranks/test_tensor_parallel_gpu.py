"""Tensor parallelism over NCCL, collectives inside CUDA graphs: 2 and 4 GPUs answer as one does.

    python -m pytest tests/gpu/ranks/test_tensor_parallel_gpu.py -m gpu -s

IDLM_RANKS_DEVICE=cpu rehearses it without a GPU, over gloo and without graphs being captured."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from idlm.contracts import Completion, SamplingParams
from idlm.errors import UserError
from idlm.infer.distributed.launcher import DriverWorker, TensorParallelGroup, create_worker
from idlm.infer.engine import Engine
from idlm.infer.settings import check_options
from idlm.semantics import Semantics
from tests.adapters import write_adapter
from tests.contracts.engines import (
    CYCLE,
    MASK_ID,
    acceptance_of,
    answers_and_margins,
    assert_idle,
    clear_answers,
    greedy,
    prompts_of,
)
from tests.numerics.test_family_parity import MASK, llada2
from tests.toy import write_toy_checkpoint

DEVICE = os.environ.get("IDLM_RANKS_DEVICE", "cuda")
ROOT = Path(__file__).resolve().parents[3]
TINY = ROOT / "recipes" / "assets" / "tiny_ar"
NUM_GPUS = torch.cuda.device_count() if DEVICE == "cuda" else 4
SIZES = [
    pytest.param(
        (size, links),
        id=f"{size}-{'links' if links else 'nccl'}",
        marks=pytest.mark.skipif(size > NUM_GPUS, reason=f"torch sees {NUM_GPUS} GPUs, needs {size}"),
    )
    for size, links in ((2, False), (2, True), (4, True))
]
SETTINGS: dict[str, Any] = {
    "device": DEVICE,
    "dtype": "float32",
    "graphs": "on",
    "num_inflight_steps": 4,
    "max_num_seqs": 16,
    "max_length": 256,
    "max_num_batched_tokens": 64,
}
DECODERS: list[tuple[str, str, dict[str, Any]]] = [
    ("Qwen3", "ar", {}),
    ("Qwen3", "isd", {"stride": 2}),
    ("Qwen2", "isd", {"stride": 4, "rejection_strategy": "branch"}),
    ("Qwen2", "isd", {"stride": 4, "adaptive": True}),
]
PATIENCE = 30.0

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:stride")]


@pytest.fixture(scope="module", params=SIZES)
def group(request: pytest.FixtureRequest) -> Iterator[TensorParallelGroup]:
    size, links = request.param
    group = TensorParallelGroup.start(size, torch.device(DEVICE), links=links)
    assert DEVICE == "cpu" or (group.shards.memory is not None) is links
    yield group
    group.close()


@pytest.fixture(scope="module")
def toy(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An odd vocabulary, and heads for four ranks."""
    architecture = getattr(request, "param", "Qwen3")
    directory = tmp_path_factory.mktemp(architecture)
    write_toy_checkpoint(directory, architecture=architecture, vocab_size=51, num_kv_heads=4, width=64)
    Semantics(mask_token_id=MASK_ID, stride=4).save(directory)
    return directory


def _one(path: Path, decoder: str, **options: Any) -> Engine:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Engine.from_pretrained(path, decoder, **{**SETTINGS, **options})


def _several(group: TensorParallelGroup, path: Path, decoder: str, **options: Any) -> Engine:
    checked = check_options(decoder, {**SETTINGS, **options, "tensor_parallel": group.shards.size})
    worker = create_worker(path, checked, group)
    return Engine(worker.parts, worker)


def _is_clear(
    path: Path, decoder: str, prompts: list[list[int]], max_tokens: int, **options: Any
) -> list[bool]:
    """Which greedy answers do not hang on rounding, which differs between one rank and several."""
    device = {"device": "cpu", "graphs": "off", "num_inflight_steps": 0}
    _, is_clear = answers_and_margins(
        _one(path, decoder, **device, **options), prompts, greedy(max_tokens=max_tokens)
    )
    assert sum(is_clear) >= len(prompts) - 1, "answers with near ties are not compared: give other prompts"
    return is_clear


def _clear(completions: list[Completion], is_clear: list[bool]) -> list[Completion]:
    return [completion for completion, clear in zip(completions, is_clear, strict=True) if clear]


def _compare(engine: Engine) -> None:
    assert isinstance(engine._worker, DriverWorker)
    engine._worker.compare()


@pytest.mark.parametrize(("toy", "decoder", "options"), DECODERS, indirect=["toy"], ids=str)
def test_greedy_answers_are_those_of_one_gpu(
    group: TensorParallelGroup, toy: Path, decoder: str, options: dict[str, Any]
) -> None:
    prompts = prompts_of([1, 7, 30, 5, 12, 64, 100, 3, 9, 18])
    # Adaptive strides follow the clock: only their tokens are compared, which are those of decoder ar.
    judge = ("ar", {}) if options.get("adaptive") else (decoder, options)
    is_clear = _is_clear(toy, judge[0], prompts, 40, **judge[1])
    expected = _clear(_one(toy, decoder, **options).generate(prompts, greedy(max_tokens=40)), is_clear)
    engine = _several(group, toy, decoder, **options)
    found = _clear(engine.generate(prompts, greedy(max_tokens=40)), is_clear)
    assert [mine.token_ids for mine in found] == [one.token_ids for one in expected]
    if not options.get("adaptive"):
        assert acceptance_of(found) == acceptance_of(expected)
    _compare(engine)
    assert_idle(engine)


def test_experts_are_split_by_number(group: TensorParallelGroup, tmp_path: Path) -> None:
    """With groups, a shared expert and a fused projection; every rank holds some of the 12."""
    llada2(tmp_path, num_key_value_heads=4, max_position_embeddings=256)
    prompts = prompts_of([1, 7, 30, 5, 12], vocab_size=MASK)
    is_clear = _is_clear(tmp_path, "block", prompts, 12)
    expected = _clear(_one(tmp_path, "block").generate(prompts, greedy(max_tokens=12)), is_clear)
    engine = _several(group, tmp_path, "block")
    found = _clear(engine.generate(prompts, greedy(max_tokens=12)), is_clear)
    assert [mine.token_ids for mine in found] == [one.token_ids for one in expected]
    _compare(engine)
    assert_idle(engine)


def test_a_tight_pool_aborts_and_draws_keep_the_ranks_in_step(group: TensorParallelGroup, toy: Path) -> None:
    engine = _several(group, toy, "isd", stride=4, num_pages=40, page_size=4, dtype="bfloat16")
    finished: dict[str, Completion] = {}
    for number, prompt in enumerate(prompts_of([1 + number % 40 for number in range(120)], vocab_size=CYCLE)):
        params = SamplingParams(seed=number, temperature=number % 2, max_tokens=1 + number % 30)
        engine.add_request(str(number), prompt, params)
    num_steps = 0
    while engine.has_work:
        for event in engine.step():
            if event.completion is not None:
                finished[event.request_id] = event.completion
        num_steps += 1
        if num_steps % 4 == 0 and engine.scheduler.running:
            engine.abort(engine.scheduler.running[-1].request_id)
        if num_steps % 64 == 0:
            _compare(engine)
    _compare(engine)
    assert_idle(engine)
    assert engine.scheduler.num_preemptions > 0
    assert len(finished) > 30


def test_an_adapter_keeps_its_bases_answers(group: TensorParallelGroup, toy: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter", toy, mask_token_id=MASK_ID, stride=4, size=0.12, rank=16)
    prompts = prompts_of([1, 7, 30])
    is_clear = _is_clear(toy, "ar", prompts, 24)
    expected = _clear(_one(toy, "ar").generate(prompts, greedy(max_tokens=24)), is_clear)
    engine = _several(group, adapter, "isd", stride=4)
    found = _clear(engine.generate(prompts, greedy(max_tokens=24)), is_clear)
    assert [mine.token_ids for mine in found] == [one.token_ids for one in expected]
    _compare(engine)


def test_ranks_warm_up_together(group: TensorParallelGroup, toy: Path) -> None:
    prompts = prompts_of([1, 7, 30])
    expected = clear_answers(_one(toy, "ar"), prompts, greedy(max_tokens=24))
    engine = _several(group, toy, "isd", stride=4, warmup="full")
    assert DEVICE == "cpu" or engine.metrics()["graphs_captured_ahead"] > 8
    found = engine.generate(prompts, greedy(max_tokens=24))
    assert [mine.token_ids for mine in found] == [one.token_ids for one in expected]
    assert engine.metrics()["graphs_captured_in_traffic"] == 0
    _compare(engine)


@pytest.mark.skipif(NUM_GPUS < 2, reason=f"torch sees {NUM_GPUS} GPUs, needs 2")
def test_a_killed_rank_is_an_error_and_the_next_engine_works() -> None:
    """Also when the killed rank leaves a captured collective hanging on the GPU of rank 0."""
    code = (
        "import sys, time\n"
        "from tests.gpu.ranks import test_tensor_parallel_gpu as it\n"
        "it.lose_a_rank()\n"
        "print('began anew', flush=True)\n"
    )
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=240, check=False
    )
    print(done.stdout, done.stderr, f"{time.monotonic() - start:.1f} s")
    assert done.stdout.rstrip().endswith("began anew")
    assert done.returncode == 0


def lose_a_rank() -> None:
    """Runs in another process, because the test is whether that process ends."""
    prompts = prompts_of([5, 30])
    options = {"mask_token_id": 170, "stride": 4, "tensor_parallel": 2}
    expected = clear_answers(_one(TINY, "ar"), prompts, greedy(max_tokens=40))
    engine = _one(TINY, "isd", **options)
    found = engine.generate(prompts, greedy(max_tokens=40))
    assert [mine.token_ids for mine in found] == [one.token_ids for one in expected]
    assert isinstance(engine._worker, DriverWorker)
    [process] = engine._worker.group._processes
    engine.add_request("a", prompts[0], greedy(max_tokens=100))
    engine.step()
    process.kill()
    start = time.monotonic()
    with pytest.raises(UserError, match="IDLM-0426"):
        engine.generate(prompts, greedy(max_tokens=200))
    assert time.monotonic() - start < PATIENCE
    print(f"noticed after {time.monotonic() - start:.1f} s", flush=True)
    again = _one(TINY, "isd", **options)
    found = again.generate(prompts, greedy(max_tokens=40))
    assert [mine.token_ids for mine in found] == [one.token_ids for one in expected]
    again.close()


@pytest.mark.skipif(NUM_GPUS < 2, reason=f"torch sees {NUM_GPUS} GPUs, needs 2")
def test_the_command() -> None:
    arguments = ["decoder=ar", f"device={DEVICE}", "dtype=float32", "sampling.temperature=0", "stats=false"]
    command = [
        sys.executable,
        "-m",
        "idlm.infer.cli.generate",
        f"model={TINY}",
        *arguments,
        "-p",
        "Lea has 9 shells.",
    ]
    output = [
        subprocess.run([*command, *more], cwd=ROOT, capture_output=True, text=True, timeout=240, check=True)
        for more in ([], ["tensor_parallel=2"])
    ]
    assert output[0].stdout == output[1].stdout
    assert output[0].stdout.strip()
