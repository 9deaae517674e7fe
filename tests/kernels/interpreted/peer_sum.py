"""The kernel of sums over ranks in the interpreter: started by test_interpreted.py.

Ranks are processes that share their boxes. tests/gpu/ranks/test_peer_sum_gpu.py runs it over NVLink."""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection

import pytest
import torch
import triton
from torch import Tensor

from idlm.kernels.peer_sum import boxes as of_boxes
from idlm.kernels.peer_sum import kernel, peer_sum_rms_norm
from tests.kernels.cases.peer_sum import CALLS, check_sums

PROCESSES = multiprocessing.get_context("fork")
NUM_SLOTS = 5
PATIENCE = 120


def shared_boxes(size: int, width: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The boxes of all ranks, empty, and the word that ends waiting, in memory that child processes share."""
    monkeypatch.setattr(of_boxes, "LARGEST_BYTES", NUM_SLOTS * -(-width * dtype.itemsize // 16) * 16)
    num_elements = of_boxes.box_bytes(size) // dtype.itemsize
    made = [torch.full((num_elements,), -0.0, dtype=dtype).share_memory_() for _ in range(size)]
    return [*made, torch.zeros(1, dtype=torch.int32).share_memory_()]


def rank_of(memory: list[Tensor], rank: int, width: int, dtype: torch.dtype) -> of_boxes.PeerBoxes:
    *pointers, stop = (each.data_ptr() for each in memory)
    device = torch.device("cpu")
    boxes = of_boxes.make_boxes(rank, width, dtype, pointers=pointers, stop=stop, device=device)
    assert boxes.num_slots == NUM_SLOTS
    return boxes


def _run(connection: Connection, memory: list[Tensor], rank: int, width: int, dtype: torch.dtype) -> None:
    try:
        found = check_sums(rank_of(memory, rank, width, dtype), CALLS)
        connection.send([each.numpy() for each in found])
    except BaseException as error:
        connection.send(repr(error))


@pytest.mark.sweep_but(1)
@pytest.mark.parametrize(
    ("size", "width", "dtype"),
    [(3, 17, torch.float16), (2, 24, torch.float32), (8, 5, torch.float32)],
)
def test_all_ranks_get_the_same_sums(
    size: int, width: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = shared_boxes(size, width, dtype, monkeypatch)
    ranks = []
    for rank in range(size):
        ours, theirs = PROCESSES.Pipe()
        process = PROCESSES.Process(target=_run, args=(theirs, memory, rank, width, dtype), daemon=True)
        process.start()
        ranks.append((process, ours))
    results = []
    for process, connection in ranks:
        results.append(connection.recv() if connection.poll(PATIENCE) else "it has not ended")
        process.kill()
    for rank, result in enumerate(results):
        assert not isinstance(result, str), f"rank {rank}: {result}"
        assert all((mine == first).all() for mine, first in zip(result, results[0], strict=True))
    is_empty = torch.stack(memory[:-1]) == 0
    assert is_empty.all() and torch.stack(memory[:-1]).signbit().all()


@pytest.mark.parametrize("rounds", [1, 2])
def test_waiting_for_a_rank_that_is_gone_can_be_ended(rounds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "STOP_POLLS", triton.language.constexpr(4))
    memory = shared_boxes(2, 8, torch.float32, monkeypatch)
    memory[-1].fill_(1)
    x_RD, residual_RD, weight_D = torch.ones(2, 8), torch.zeros(2, 8), torch.ones(8)
    boxes = rank_of(memory, 1, 8, torch.float32)
    peer_sum_rms_norm(x_RD, residual_RD, weight_D, eps=1e-6, boxes=boxes, rounds=rounds)
