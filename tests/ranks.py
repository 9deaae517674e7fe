"""Ranks as threads of the test's own process: the same code and real gloo collectives, without starting
processes."""

from __future__ import annotations

import contextlib
import tempfile
import threading
import warnings
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from idlm.infer.distributed.launcher import TensorParallelGroup, create_worker
from idlm.infer.distributed.messages import receive, send
from idlm.infer.distributed.rank import describe
from idlm.infer.distributed.worker_loop import worker_loop
from idlm.infer.engine import Engine
from idlm.infer.models.base import Shards
from idlm.infer.settings import check_options

LONGEST_WAIT = timedelta(seconds=60)
SMALL: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "max_num_seqs": 16,
    "max_length": 128,
    "max_num_batched_tokens": 12,
    "page_size": 4,
}


def shards_of(rank: int, size: int, folder: Path) -> Shards:
    """A new process group; returns when all ranks have joined."""
    store = dist.FileStore(str(folder / "store"), size)
    group, kind = dist.ProcessGroup(store, rank, size), dist.ProcessGroup.BackendType.GLOO
    backend: Any = dist.ProcessGroupGloo(store, rank, size, LONGEST_WAIT)
    group._set_default_backend(kind)
    group._register_backend(torch.device("cpu"), kind, backend)
    return Shards(rank=rank, size=size, group=group, control=group)


@contextlib.contextmanager
def group_of_threads(size: int) -> Iterator[TensorParallelGroup]:
    """A group whose other ranks are threads."""
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as end:
        connections, threads = [], []
        for rank in range(1, size):
            ours, theirs = Pipe()
            connections.append(ours)
            threads.append(
                threading.Thread(target=_serve, args=(theirs, rank, size, Path(name)), daemon=True)
            )
            threads[-1].start()
            end.callback(ours.close)
        group = TensorParallelGroup(connections, end.pop_all(), shards=shards_of(0, size, Path(name)))
        try:
            yield group
        finally:
            group.close()
            for thread in threads:
                thread.join()


def _serve(connection: Connection, rank: int, size: int, folder: Path) -> None:
    torch.set_num_threads(1)
    try:
        worker_loop(partial(receive, connection), partial(send, connection), shards_of(rank, size, folder))
    except Exception as error:
        with contextlib.suppress(OSError):
            send(connection, {"failed": describe(error)})
    finally:
        connection.close()


def group_engine(group: TensorParallelGroup, directory: Path, decoder: str, **options: Any) -> Engine:
    """As `build_engine`, with the ranks of `group`, on the CPU."""
    plain = SMALL | options | {"tensor_parallel": group.shards.size}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        worker = create_worker(directory, check_options(decoder, plain), group)
        return Engine(worker.parts, worker)
