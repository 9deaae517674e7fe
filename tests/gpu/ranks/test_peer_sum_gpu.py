"""Sums over ranks in each other's memory, one process per GPU: values, order, graphs, and ranks that are late
or gone."""

from __future__ import annotations

import hashlib
import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor

from idlm.kernels.peer_sum import PeerBoxes, open_memory, peer_sum_rms_norm
from tests.kernels.cases.peer_sum import CALLS, EPS, check_sums

NUM_GPUS = torch.cuda.device_count()
SIZES = [
    pytest.param(
        size, marks=pytest.mark.skipif(size > NUM_GPUS, reason=f"torch sees {NUM_GPUS} GPUs, needs {size}")
    )
    for size in (2, 3, 4, 8)
]
WIDTHS = [(4096, torch.bfloat16), (24, torch.float16), (1001, torch.float32)]
MANY_CALLS, NUM_REPLAYS = 2000, 200
LATE_SECONDS, LATE_CYCLES = 0.05, 20_000_000

pytestmark = pytest.mark.multigpu


@pytest.mark.parametrize("size", SIZES)
def test_sums_between_gpus(size: int, tmp_path: Path) -> None:
    torch.multiprocessing.spawn(_rank, args=(size, str(tmp_path / "store")), nprocs=size)


def _rank(rank: int, size: int, store: str) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group("gloo", store=dist.FileStore(store, size), rank=rank, world_size=size)
    memory = open_memory(rank, size, None, torch.zeros(1, dtype=torch.int32, pin_memory=True))
    assert memory is not None, "GPUs without NVLink"

    def tell(what: str) -> None:
        if rank == 0:
            print(f"{time.monotonic() - start_time:6.1f} s: {what}", flush=True)

    start_time = time.monotonic()
    for width, dtype in WIDTHS:
        boxes = memory.boxes(width, dtype)
        dist.barrier()
        calls = [
            *CALLS,
            (64, None),
            (300, None),
            (boxes.num_slots if width < 100 else 7, None),
            (1, None),
        ]
        found = check_sums(boxes, calls, before=lambda number: _be_late(number, rank, size))
        _assert_equal_on_all_ranks(found, size)
        tell(f"{len(calls)} sums of {width} columns")
    exact = memory.boxes(256, torch.float32)
    dist.barrier()
    _check_many(exact)
    tell(f"{MANY_CALLS} sums in a row")
    _check_graphs(exact)
    tell(f"{NUM_REPLAYS} replays of graphs")
    _check_the_end_of_waiting(exact, memory.stop)
    tell("waiting ends")
    dist.barrier()
    dist.destroy_process_group()


def _be_late(number: int, rank: int, size: int) -> None:
    """By turns a rank launches late, and another one's GPU is late."""
    if number % (size + 1) == rank:
        time.sleep(LATE_SECONDS)
    if number % (size + 2) == rank:
        torch.cuda._sleep(LATE_CYCLES)


def _assert_equal_on_all_ranks(found: list[Tensor], size: int) -> None:
    mine = [hashlib.sha256(each.view(torch.uint8).numpy().tobytes()).hexdigest() for each in found]
    everyone: list[Any] = [None] * size
    dist.all_gather_object(everyone, mine)
    assert all(one == everyone[0] for one in everyone)


def _numbered(boxes: PeerBoxes, rows: int, number: int) -> tuple[Tensor, float]:
    """Summands of this rank, and what any element of their sum is."""
    factor = float(1 + number % 7)
    x_RD = torch.full((rows, boxes.width), factor * (boxes.rank + 1), device="cuda")
    return x_RD, factor * boxes.size * (boxes.size + 1) / 2


def _check_many(boxes: PeerBoxes) -> None:
    """Sums of changing numbers of rows and rounds, launched without waiting. Whole numbers, so exact ones."""
    rng, residual_RD, weight_D = (
        random.Random(0),
        torch.zeros(96, 256, device="cuda"),
        torch.ones(256).cuda(),
    )
    expected_R1 = torch.zeros(96, 1)
    for number in range(MANY_CALLS):
        rows, rounds = rng.choice((1, 2, 31, 64, 96)), rng.choice((1, 2))
        x_RD, total = _numbered(boxes, rows, number)
        if number % 500 == boxes.rank:
            time.sleep(LATE_SECONDS)
        peer_sum_rms_norm(x_RD, residual_RD[:rows], weight_D, eps=EPS, boxes=boxes, rounds=rounds)
        expected_R1[:rows] += total
    assert torch.equal(residual_RD.cpu(), expected_R1.expand(96, 256))


def _check_graphs(boxes: PeerBoxes) -> None:
    """Two graphs, with odd numbers of sums, replayed by turns, with eager sums in between."""
    weight_D, inputs, graphs = torch.ones(256).cuda(), [], []
    residual_RD = torch.zeros(700, 256, device="cuda")
    for shapes in ([(64, 1), (700, 2), (5, 1)], [(3, 2), (64, 1), (1, 1), (9, 2), (64, 2)]):
        drawn = [_numbered(boxes, rows, number) for number, (rows, _) in enumerate(shapes)]
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            for (rows, rounds), (x_RD, _) in zip(shapes, drawn, strict=True):
                peer_sum_rms_norm(x_RD, residual_RD[:rows], weight_D, eps=EPS, boxes=boxes, rounds=rounds)
        # Replays read them again.
        inputs.append(drawn)
    residual_RD.zero_()
    expected_R1 = torch.zeros(700, 1)
    for number in range(NUM_REPLAYS):
        if number % 50 == 7 * boxes.rank:
            torch.cuda._sleep(LATE_CYCLES)
        graphs[number % 2].replay()
        for x_RD, total in inputs[number % 2]:
            expected_R1[: len(x_RD)] += total
        if number % 3 == 0:
            x_RD, total = _numbered(boxes, 17, number)
            peer_sum_rms_norm(x_RD, residual_RD[:17], weight_D, eps=EPS, boxes=boxes)
            expected_R1[:17] += total
    is_wrong_R = (residual_RD.cpu() != expected_R1).any(dim=1)
    assert not is_wrong_R.any(), f"rows {is_wrong_R.nonzero().flatten().tolist()} of rank {boxes.rank}"


def _check_the_end_of_waiting(boxes: PeerBoxes, stop: Tensor) -> None:
    """The last rank does not take part."""
    torch.cuda.synchronize()
    dist.barrier()
    if boxes.rank < boxes.size - 1:
        x_RD, _ = _numbered(boxes, 64, 0)
        # Copies from the host would wait for the sums.
        residual_RD, weight_D, event = torch.zeros_like(x_RD), torch.ones(256).cuda(), torch.cuda.Event()
        for rounds in (1, 2):
            peer_sum_rms_norm(x_RD, residual_RD, weight_D, eps=EPS, boxes=boxes, rounds=rounds)
        event.record()
        time.sleep(LATE_SECONDS)
        assert not event.query(), "a sum without one of its summands"
        stop.fill_(1)
        torch.cuda.synchronize()
