"""Sums over ranks with the norm that follows, in each other's memory against NCCL, by number of rows.

    python -m benchmarks.peer_sums [sizes=2,4] [width=4096] [rows=1,16,64,192,448,1024] [rounds=5]
        [record=true]

Time of one of the `CALLS` sums of a CUDA graph, bfloat16: in one round of writing and waiting, in two, and by
NCCL's all-reduce and `add_rms_norm`. `rounds` are repetitions, of which the median counts.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor

from benchmarks.results import result_row
from benchmarks.shared import defaults, numbers, parse_options, save, start
from idlm.errors import UserError
from idlm.kernels.peer_sum import open_memory, peer_sum_rms_norm
from idlm.kernels.peer_sum.op import num_rounds
from idlm.kernels.rms_norm import add_rms_norm

DEFAULTS = defaults("sizes=2,4 width=4096 rows=1,16,64,192,448,1024 rounds=5 record=true")
CALLS, REPLAYS = 20, 10
EPS = 1e-6


def measure(arguments: list[str]) -> int:
    """Measure all sizes; returns the exit status. Raises IDLM-0543 when there are too few GPUs."""
    options = parse_options(arguments, DEFAULTS)
    if torch.cuda.device_count() < max(numbers(options["sizes"])):
        raise UserError(
            "IDLM-0543",
            f"sizes={options['sizes']} on {torch.cuda.device_count()} CUDA devices",
            fix="use a host with as many GPUs as the largest size, or smaller sizes",
        )
    for size in numbers(options["sizes"]):
        with tempfile.TemporaryDirectory() as folder:
            store = str(Path(folder) / "store")
            torch.multiprocessing.spawn(_rank, args=(size, store, options), nprocs=size)
    return 0


def _rank(rank: int, size: int, store: str, options: dict[str, str]) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", store=dist.FileStore(store, size), rank=rank, world_size=size)
    hosts, width = dist.new_group(backend="gloo"), int(options["width"])
    stop = torch.zeros(1, dtype=torch.int32, pin_memory=True)
    memory = open_memory(rank, size, hosts, stop)
    assert memory is not None, "GPUs without NVLink"
    boxes = memory.boxes(width, torch.bfloat16)
    dist.barrier(hosts)
    weight_D, found = torch.ones(width, device="cuda", dtype=torch.bfloat16), []
    for num_rows in numbers(options["rows"]):
        x_RD, residual_RD = torch.zeros(2, num_rows, width, device="cuda", dtype=torch.bfloat16)

        def peers(rounds: int, x_RD: Tensor = x_RD, residual_RD: Tensor = residual_RD) -> None:
            peer_sum_rms_norm(x_RD, residual_RD, weight_D, eps=EPS, boxes=boxes, rounds=rounds)

        def nccl(x_RD: Tensor = x_RD, residual_RD: Tensor = residual_RD) -> None:
            dist.all_reduce(x_RD)
            add_rms_norm(x_RD, residual_RD, weight_D, eps=EPS)

        repeats = int(options["rounds"])
        times = {rounds: _microseconds(partial(peers, rounds), repeats) for rounds in (1, 2)}
        (baseline, _), chosen = _microseconds(nccl, repeats), num_rounds(x_RD.nbytes, size)
        case = {"gpus": size, "rows": num_rows, "width": width}
        found.append(result_row("peer_sums", case, "us", times[chosen][0], "us", baseline=baseline))
        if rank == 0:
            print(
                f"{size} GPUs  {num_rows:5d} rows  {x_RD.nbytes / 1e6:6.2f} MB  one round "
                f"{times[1][0]:7.2f} (to {times[1][1]:.2f})  two {times[2][0]:7.2f} (to {times[2][1]:.2f})  "
                f"NCCL {baseline:7.2f} us; chosen: {chosen}",
                flush=True,
            )
    if rank == 0:
        save("peer_sums", found, options)
    dist.barrier(hosts)
    dist.destroy_process_group()


def _microseconds(call: Callable[[], None], repeats: int) -> tuple[float, float]:
    """Median and longest time of one call among `CALLS` of a graph."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(CALLS):
            call()
    found, events = [], [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    for _ in range(repeats):
        graph.replay()
        events[0].record()
        for _ in range(REPLAYS):
            graph.replay()
        events[1].record()
        events[1].synchronize()
        found.append(1e3 * events[0].elapsed_time(events[1]) / CALLS / REPLAYS)
    return sorted(found)[len(found) // 2], max(found)


if __name__ == "__main__":
    start(measure, __doc__)
