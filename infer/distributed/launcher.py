"""Tensor parallelism as rank 0 sees it: start the other ranks, send them every pass, notice when one is gone,
and end them.

The scheduler, page accounting, prefix cache and texts exist on rank 0 only. All ranks hold all logits and
draw from the same random streams, so rank 0 sends passes and no tensors. Ranks are started as modules, not by
`multiprocessing`'s spawn, which would run a caller's script again when it has no `__main__` guard."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path

import torch
import torch.distributed as dist

from idlm.devices import is_out_of_memory
from idlm.errors import UserError
from idlm.infer.build import build, resolve_device
from idlm.infer.distributed.messages import Message, receive, send, step_message
from idlm.infer.distributed.worker_loop import digest
from idlm.infer.models.base import ALONE, Shards
from idlm.infer.parts import EngineParts
from idlm.infer.runtime.graphs.cuda_graphs import StaticStep
from idlm.infer.runtime.model_runner import StepResult
from idlm.infer.runtime.worker import Worker
from idlm.infer.settings import EngineOptions
from idlm.infer.state.batch import Schedule
from idlm.kernels.peer_sum import open_memory

STEPS_BETWEEN_DIGESTS = 256
FAILURE_REASON_TIMEOUT = 3.0
SHUTDOWN_TIMEOUT = 3.0
WATCH_INTERVAL = 1.0
DETECTION_TIMEOUT, ANSWER_TIMEOUT = 5.0, 3600.0
FAILURE_FIX = "build a new engine; the reason is above, on standard error, or in the kernel's log"
OUT_OF_MEMORY_FIX = (
    "ranks cannot recover from an out-of-memory error: build a new engine with a lower "
    "max_num_batched_tokens, max_num_seqs or num_pages"
)


class TensorParallelGroup:
    """The ranks 1 .. n-1. They end when the group is closed or collected, or when this process ends."""

    def __init__(
        self,
        connections: Sequence[Connection],
        end: contextlib.ExitStack,
        *,
        processes: Sequence[subprocess.Popen[bytes]] = (),
        shards: Shards = ALONE,
    ) -> None:
        self.shards = shards
        self._connections, self._processes = connections, processes
        self._answers: list[deque[Message]] = [deque() for _ in connections]
        self._failure: UserError | None = None
        self._undo, self._end = end, weakref.finalize(self, end.close)

    @classmethod
    def start(cls, size: int, device: torch.device, *, links: bool = True) -> TensorParallelGroup:
        """Start one process for each further rank and join them in a process group. With `links` GPUs that
        reach each other's memory (NVLink) sum few rows there; all other sums are NCCL's.

        UserError IDLM-0425: too few GPUs; IDLM-0427: a launcher or another tensor-parallel engine is active
        in this process; IDLM-0426: a rank did not start."""
        _check_process(size, device)
        # NVLink multicast can disable GPUs that other processes on the host use.
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
        # We report a lost rank; torch would end this process with a stack trace only.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
        folder = tempfile.mkdtemp(prefix="idlm-ranks-")
        store = str(Path(folder) / "store")
        hello: Message = {"size": size, "device": device.type, "store": store, "links": links}
        with contextlib.ExitStack() as end:
            end.callback(shutil.rmtree, folder, ignore_errors=True)
            end.callback(_leave_process_group)
            ranks = [_start_rank({"rank": rank, **hello}, end) for rank in range(1, size)]
            connections, processes = zip(*ranks, strict=True)
            group = cls(connections, end.pop_all(), processes=processes)
        with group.translating_failures():
            group.answers()
            group.broadcast({"state": "join"})
            group.shards = join(rank=0, **hello)
        if device.type == "cuda":
            free = partial(_end_waiting, group.shards)
            group._undo.callback(group.shards.stop_waiting)
            group.free_when_stuck(free)
        return group

    def end_after(self, clear: Callable[[], None]) -> None:
        """Call the bound method `clear`, if its object still exists, before the ranks are ended."""
        method = weakref.WeakMethod(clear)
        self._undo.callback(lambda: (call := method()) and call())

    def free_when_stuck(self, free: Callable[[], None]) -> None:
        """Call `free` in another thread when a rank is gone and rank 0 has not noticed for DETECTION_TIMEOUT
        seconds, because it may wait in CUDA for a collective of that rank."""
        is_ended = threading.Event()
        self._undo.callback(is_ended.set)
        for connection in self._connections:
            threading.Thread(target=_watch, args=(connection.fileno(), is_ended, free), daemon=True).start()

    def broadcast(self, message: Message) -> None:
        self.check()
        for connection in self._connections:
            # `check` reports a rank that is gone, with the reason.
            with contextlib.suppress(OSError):
                send(connection, message)

    def answers(self) -> list[Message]:
        """Wait up to ANSWER_TIMEOUT for one answer of every rank; returns them in order of ranks."""
        self.check()
        deadline = time.monotonic() + ANSWER_TIMEOUT
        while not all(self._answers):
            if not wait(self._connections, max(0.0, deadline - time.monotonic())):
                silent = [rank for rank, answers in enumerate(self._answers, start=1) if not answers]
                self._fail("IDLM-0426", f"ranks {silent} have answered nothing for {ANSWER_TIMEOUT:.0f} s")
            self.check()
        return [waiting.popleft() for waiting in self._answers]

    def check(self) -> None:
        """Read what has arrived, without waiting. UserError IDLM-0426 for a rank that is gone, or the
        UserError that a rank failed with."""
        for rank, connection in enumerate(self._connections, start=1):
            while self._failure is None and connection.poll():
                self._take(rank, receive(connection))
        if self._failure is not None:
            error = self._failure
            raise UserError(error.code, error.message, fix=error.fix)

    @contextlib.contextmanager
    def translating_failures(self) -> Iterator[None]:
        """For what all ranks do in step. An error inside ends all ranks, which could wait for rank 0 for
        ever.

        Raises the failure of another rank if that caused the error; UserError IDLM-0428 when rank 0 is out of
        memory."""
        try:
            yield
        except BaseException as error:
            if isinstance(error, Exception) and not isinstance(error, UserError):
                self._await_failure()
            fix = OUT_OF_MEMORY_FIX if is_out_of_memory(error) else ""
            self._fail("IDLM-0428", f"the ranks were ended after an error on rank 0: {error!r}", fix)
            if is_out_of_memory(error):
                self.check()
            raise

    def _await_failure(self) -> None:
        """Raise the failure of another rank if it comes soon: it may have caused an error here."""
        deadline = time.monotonic() + FAILURE_REASON_TIMEOUT
        self.check()
        while (seconds := deadline - time.monotonic()) > 0:
            wait(self._connections, seconds)
            self.check()

    def close(self) -> None:
        """End all ranks; later calls raise UserError IDLM-0428."""
        self._fail("IDLM-0428", "this engine is closed")

    def _take(self, rank: int, message: Message | None) -> None:
        if message is None:
            how = _how_it_ended(self._processes[rank - 1]) if self._processes else ""
            self._fail("IDLM-0426", f"rank {rank} of {len(self._connections) + 1} is gone{how}")
        elif "failed" in message:
            failure: dict[str, str] = message["failed"]
            self._fail(
                failure.get("code", "IDLM-0426"),
                f"rank {rank} failed: {failure['message']}",
                failure.get("fix"),
            )
        else:
            self._answers[rank - 1].append(message)

    def _fail(self, code: str, message: str, fix: str | None = None) -> None:
        if self._failure is None:
            self._failure = UserError(code, message, fix=fix or FAILURE_FIX)
            self._end()


class DriverWorker(Worker):
    """The worker of rank 0."""

    def __init__(self, parts: EngineParts, group: TensorParallelGroup) -> None:
        super().__init__(parts)
        self.group, self._num_passes = group, 0
        if isinstance(parts.step, StaticStep):
            group.end_after(parts.step.clear)

    def launch(self, schedule: Schedule) -> StepResult:
        """Send the pass to the other ranks, then run it.

        The engine lets no SIGINT or SIGTERM in, because ranks that are out of step cannot be brought back. A
        second Ctrl-C does not wait: it ends the ranks, and with them a pass that hangs."""
        message = step_message(schedule, self.parts.pool.unwritten)
        with self.group.translating_failures():
            self.group.broadcast({"do": "pass", **message})
            result = super().launch(schedule)
        self._num_passes += 1
        if self._num_passes % STEPS_BETWEEN_DIGESTS == 0:
            self.compare()
        return result

    def compare(self) -> None:
        """Wait for all passes; UserError IDLM-0429 if ranks differ in their tokens or pointers."""
        self.group.broadcast({"do": "digest"})
        mine = digest(self.parts.table)
        others = [answer["digest"] for answer in self.group.answers()]
        odd = [rank for rank, other in enumerate(others, start=1) if other != mine]
        if odd:
            self.group.close()
            raise UserError(
                "IDLM-0429",
                f"after {self._num_passes} passes the tokens of ranks {odd} are not those of rank 0",
                fix="use tensor_parallel=1 and report it: collectives here do not give all ranks equal bits",
            )

    def check(self) -> None:
        self.group.check()

    def capture_missed(self) -> bool:
        """Do nothing: ranks capture graphs together, in passes."""
        return False

    def free_cached_memory(self) -> None:
        """Do nothing: ranks capture graphs together, so rank 0 must not drop its own."""

    def close(self) -> None:
        """End the ranks."""
        self.group.close()


def create_worker(
    path: str | Path, checked: EngineOptions, group: TensorParallelGroup | None = None
) -> DriverWorker:
    """Build an engine's worker with the ranks of `group`, or with `tensor_parallel` new ones."""
    settings = checked.settings
    group = group or TensorParallelGroup.start(settings.tensor_parallel, resolve_device(settings.device))
    options = {**settings.options(), **checked.decoder_options}
    with group.translating_failures():
        group.broadcast({"do": "build", "path": str(path), "decoder": checked.decoder, "options": options})
        parts = build(path, checked, group.shards)
        group.answers()
    return DriverWorker(parts, group)


def join(*, rank: int, size: int, device: str, store: str, links: bool) -> Shards:
    """Create the process groups of this process. On "cuda" it uses the device with the number `rank`."""
    shared = dist.FileStore(store, size)
    if device != "cuda":
        dist.init_process_group("gloo", store=shared, rank=rank, world_size=size)
        return Shards(rank=rank, size=size)
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl", store=shared, rank=rank, world_size=size, device_id=torch.device("cuda", rank)
    )
    control = dist.new_group(backend="gloo")
    stop = torch.zeros(1, dtype=torch.int32, pin_memory=True)
    memory = open_memory(rank, size, control, stop) if links else None
    return Shards(rank=rank, size=size, control=control, memory=memory)


def _leave_process_group() -> None:
    if not dist.is_initialized():
        return
    if dist.get_backend() != "nccl":
        dist.destroy_process_group()
        return
    # Aborting may hang; then give up after a while.
    abort = threading.Thread(target=_abort, daemon=True)
    # No thread can be started while the interpreter exits, and then nothing has to be undone.
    with contextlib.suppress(RuntimeError):
        abort.start()
        abort.join(SHUTDOWN_TIMEOUT)


def _end_waiting(shards: Shards) -> None:
    """End all kernels that wait for ranks that are gone."""
    shards.stop_waiting()
    _abort()


def _abort() -> None:
    """End NCCL's communicators, and with them kernels that wait for ranks that are gone."""
    dist.distributed_c10d._abort_process_group()


def _watch(descriptor: int, is_ended: threading.Event, free: Callable[[], None]) -> None:
    """Wait until the other end of a connection is closed, without reading; then give rank 0 time to notice it
    itself."""
    closed = select.poll()
    closed.register(descriptor, select.POLLRDHUP)
    while not is_ended.is_set():
        if closed.poll(WATCH_INTERVAL * 1e3):
            if not is_ended.wait(DETECTION_TIMEOUT):
                free()
            return


def _check_process(size: int, device: torch.device) -> None:
    launched = os.environ.get("WORLD_SIZE", "1")
    if launched != "1" or dist.is_initialized():
        found = f"WORLD_SIZE={launched}" if launched != "1" else "a process group"
        raise UserError(
            "IDLM-0427",
            f"tensor_parallel={size} starts its own ranks, but this process already has {found}",
            fix="start one process without torchrun; close() an earlier tensor-parallel engine first",
        )
    if device.type == "cuda" and (device.index or torch.cuda.device_count() < size):
        raise UserError(
            "IDLM-0425",
            f"tensor_parallel={size} uses cuda:0 to cuda:{size - 1}; torch sees {torch.cuda.device_count()} "
            f"GPUs, and device={device}",
            fix="give a smaller tensor_parallel, and device=cuda; choose GPUs by CUDA_VISIBLE_DEVICES",
        )


def _start_rank(hello: Message, end: contextlib.ExitStack) -> tuple[Connection, subprocess.Popen[bytes]]:
    connection, theirs = Pipe()
    command = [sys.executable, "-P", "-W", "ignore", "-m", "idlm.infer.distributed.rank"]
    with theirs:
        process = subprocess.Popen(
            [*command, str(theirs.fileno()), str(os.getpid())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            # Rank 0's standard output holds answers only.
            stdout=sys.__stderr__.fileno() if sys.__stderr__ is not None else subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
            # A Ctrl-C in the terminal goes to rank 0 only.
            start_new_session=True,
        )
    end.callback(_how_it_ended, process)
    end.callback(connection.close)
    # `answers` reports a rank that is gone already, with the reason.
    with contextlib.suppress(OSError):
        send(connection, hello)
    return connection, process


def _how_it_ended(process: subprocess.Popen[bytes]) -> str:
    """Wait for a rank that is ending, kill it if it hangs, and return how it ended."""
    try:
        status = process.wait(SHUTDOWN_TIMEOUT)
    except subprocess.TimeoutExpired:
        process.kill()
        # What waits in a driver does not end, and is left to the system.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(SHUTDOWN_TIMEOUT)
        return f" (pid {process.pid}: it hung)"
    how = f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
    return f" (pid {process.pid}: {how})"
