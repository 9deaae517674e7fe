"""Rank 0's view of the other ranks of a tensor-parallel engine: starts them, tells them every pass before it
does the same, notices when one is gone, and ends them.

The engine proper (scheduler, books of the pool, prefix cache, pace, texts) lives on rank 0 alone. All ranks
hold all logits and draw from the same random numbers, so nothing but orders has to be sent.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from idlm.errors import UserError
from idlm.infer.build import EngineParts, build, resolve_device
from idlm.infer.distributed.messages import Channel, Message, step_message
from idlm.infer.errors import is_out_of_memory
from idlm.infer.models.shards import ALONE, Shards
from idlm.infer.runtime.cuda_graphs import StaticStep
from idlm.infer.runtime.model_runner import StepResult
from idlm.infer.runtime.worker import Worker
from idlm.infer.settings import check_options
from idlm.infer.state.batch import Schedule

STEPS_BETWEEN_DIGESTS = 256
FAILURE_REASON_TIMEOUT = 3.0
POLL_SECONDS = 1e-3
SHUTDOWN_TIMEOUT = 3.0
WATCH_INTERVAL = 1.0
DETECTION_TIMEOUT = 5.0
OUT_OF_MEMORY_FIX = (
    "ranks cannot go on after a shortage: build a new engine with a lower max_num_batched_tokens, max_num_seqs or "
    "num_pages"
)


class TensorParallelGroup:
    """The ranks 1 .. n-1. Ends them when it is closed, collected, or the process exits."""

    def __init__(
        self,
        channels: Sequence[Channel],
        end: contextlib.ExitStack,
        *,
        processes: Sequence[subprocess.Popen[bytes]] = (),
        shards: Shards = ALONE,
    ) -> None:
        self.shards = shards
        self._channels, self._processes = channels, processes
        self._answers: list[deque[Message]] = [deque() for _ in channels]
        self._failure: tuple[str, str, str] | None = None
        self._num_engines = 0
        self._undo, self._end = end, weakref.finalize(self, end.close)

    @classmethod
    def start(cls, size: int, device: torch.device) -> TensorParallelGroup:
        """Start a process per further rank and join them. UserError IDLM-0425: too few GPUs, IDLM-0427: a
        launcher or another such engine is in the way, IDLM-0426: a rank did not get that far.
        """
        _check_place(size, device)
        # NVLink multicast can put GPUs out of service that others on the host use.
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
        # A lost rank is our business: torch would end this process with nothing but a stack.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
        folder = tempfile.mkdtemp(prefix="idlm-ranks-")
        hello: Message = {"size": size, "device": device.type, "store": str(Path(folder) / "store")}
        with contextlib.ExitStack() as end:
            end.callback(shutil.rmtree, folder, ignore_errors=True)
            end.callback(_leave)
            ranks = [_start_rank({"rank": rank, **hello}, end) for rank in range(1, size)]
            channels, processes = zip(*ranks, strict=True)
            group = cls(channels, end.pop_all(), processes=processes)
        with group.translating_failures():
            group.answers()
            group.broadcast({"state": "join"})
            group.shards = join(rank=0, **hello)
        if device.type == "cuda":
            group.free_when_stuck(_abort)
        return group

    def next_number(self) -> int:
        """For another engine of this team."""
        self._num_engines += 1
        return self._num_engines

    def end_after(self, clear: Callable[[], None]) -> None:
        """Call `clear`, if it is still there, before anything is ended."""
        self._undo.callback(_call, weakref.WeakMethod(clear))

    def free_when_stuck(self, free: Callable[[], None]) -> None:
        """Call `free` from beside when a rank is gone and rank 0 does not notice for seconds: it may wait, in
        CUDA, for a collective of that rank.
        """
        is_ended = threading.Event()
        self._undo.callback(is_ended.set)
        for channel in self._channels:
            threading.Thread(target=_watch, args=(channel, is_ended, free), daemon=True).start()

    def broadcast(self, message: Message) -> None:
        """To all ranks."""
        self.check()
        for channel in self._channels:
            # A rank that is gone is noticed by `check`, which knows more about it.
            with contextlib.suppress(OSError):
                channel.send(message)

    def answers(self) -> list[Message]:
        """One of each rank, in order; waits for them."""
        while not all(self._answers):
            self.check()
            time.sleep(POLL_SECONDS)
        return [waiting.popleft() for waiting in self._answers]

    def check(self) -> None:
        """Listen without waiting. UserError IDLM-0426, or what a rank has failed with, once one is gone."""
        for rank, channel in enumerate(self._channels, start=1):
            while self._failure is None and channel.has_news():
                self._hear(rank, channel.receive())
        if self._failure is not None:
            code, message, fix = self._failure
            raise UserError(code, message, fix=fix)

    @contextlib.contextmanager
    def translating_failures(self) -> Iterator[None]:
        """For what all ranks do in step. An error in the middle of it ends the team: others may wait for rank
        0 there for ever. Raised is the failure of another rank, if that was the reason; UserError IDLM-0428
        when rank 0 is short of memory.
        """
        try:
            yield
        except BaseException as error:
            failure = self._reason_of(error)
            if failure is not None:
                raise failure from error
            fix = OUT_OF_MEMORY_FIX if is_out_of_memory(error) else ""
            self._fail("IDLM-0428", f"the ranks were ended after an error on rank 0: {error!r}", fix)
            if is_out_of_memory(error):
                self.check()
            raise

    def _reason_of(self, error: BaseException) -> UserError | None:
        if isinstance(error, UserError) or not isinstance(error, Exception):
            return None
        deadline = time.monotonic() + FAILURE_REASON_TIMEOUT
        while time.monotonic() < deadline:
            try:
                self.check()
            except UserError as failure:
                return failure
            time.sleep(POLL_SECONDS)
        return None

    def close(self) -> None:
        """End all ranks; whatever is asked of them afterwards is an error."""
        self._fail("IDLM-0428", "this engine is closed")

    def _hear(self, rank: int, message: Message | None) -> None:
        if message is None:
            how = _how_it_ended(self._processes[rank - 1]) if self._processes else ""
            self._fail("IDLM-0426", f"rank {rank} of {len(self._channels) + 1} is gone{how}")
        elif "failed" in message:
            said: dict[str, str] = message["failed"]
            fix = said.get("fix", "")
            self._fail(said.get("code", "IDLM-0426"), f"rank {rank} failed: {said['message']}", fix)
        else:
            self._answers[rank - 1].append(message)

    def _fail(self, code: str, message: str, fix: str = "") -> None:
        if self._failure is None:
            fix = fix or "build a new engine; the reason is above, on standard error, or in the kernel's log"
            self._failure = code, message, fix
            self._end()


class DriverWorker(Worker):
    """The worker of rank 0."""

    def __init__(
        self, parts: EngineParts, group: TensorParallelGroup, number: int, *, owns_group: bool
    ) -> None:
        super().__init__(parts)
        self.group, self._number, self._owns_group = group, number, owns_group
        self._num_passes = 0
        if isinstance(parts.step, StaticStep):
            group.end_after(parts.step.clear)

    def launch(self, schedule: Schedule) -> StepResult:
        """Tell the other ranks, then do it. Ctrl-C and SIGTERM wait until it is done: ranks that are out of
        step cannot be brought back.
        """
        order = step_message(schedule, self.parts.pool.unwritten)
        with uninterrupted(), self.group.translating_failures():
            self.group.broadcast({"do": "pass", "engine": self._number, **order})
            result = super().launch(schedule)
        self._num_passes += 1
        if self._num_passes % STEPS_BETWEEN_DIGESTS == 0:
            self.compare()
        return result

    def compare(self) -> None:
        """Whether all ranks have the same tokens and pointers; waits for all passes. UserError IDLM-0429."""
        self.group.broadcast({"do": "digest", "engine": self._number})
        mine = self.digest()
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
        """See `TensorParallelGroup.check`."""
        self.group.check()

    def free_cached_memory(self) -> None:
        """Graphs stay: ranks capture them together."""

    def close(self) -> None:
        """End the ranks that were started for this engine."""
        if self._owns_group:
            self.group.close()
        else:
            self.group.broadcast({"do": "drop", "engine": self._number})


def create_worker(
    path: str | Path, decoder: str | None, options: dict[str, Any], group: TensorParallelGroup | None = None
) -> Worker:
    """Build an engine's worker: alone, or with as many ranks as `tensor_parallel` says, by the `group` if one
    is given.
    """
    settings, decoder_options = check_options(decoder, options)
    if settings.tensor_parallel == 1:
        return Worker(build(path, decoder, options))
    owns_group = group is None
    group = group or TensorParallelGroup.start(settings.tensor_parallel, resolve_device(settings.device))
    number = group.next_number()
    plain = {**dataclasses.asdict(settings), **decoder_options}
    with group.translating_failures():
        group.broadcast(
            {"do": "build", "engine": number, "path": str(path), "decoder": decoder, "options": plain}
        )
        parts = build(path, decoder, options, group.shards)
        group.answers()
    return DriverWorker(parts, group, number, owns_group=owns_group)


def join(*, rank: int, size: int, device: str, store: str) -> Shards:
    """Make the process groups of this process, and `device` number `rank` its own, where it is "cuda"."""
    shared = dist.FileStore(store, size)
    if device != "cuda":
        dist.init_process_group("gloo", store=shared, rank=rank, world_size=size)
        return Shards(rank=rank, size=size)
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl", store=shared, rank=rank, world_size=size, device_id=torch.device("cuda", rank)
    )
    return Shards(rank=rank, size=size, control=dist.new_group(backend="gloo"))


def _call(method: weakref.WeakMethod[Callable[[], None]]) -> None:
    call = method()
    if call is not None:
        call()


def _leave() -> None:
    if not dist.is_initialized():
        return
    if dist.get_backend() != "nccl":
        dist.destroy_process_group()
        return
    # Should it wait itself, then not for ever.
    abort = threading.Thread(target=_abort, daemon=True)
    # At the end of the process no thread can be started, and nothing has to be undone.
    with contextlib.suppress(RuntimeError):
        abort.start()
        abort.join(SHUTDOWN_TIMEOUT)


def _abort() -> None:
    """End NCCL's communicators, and with them kernels that wait for ranks that are gone."""
    dist.distributed_c10d._abort_process_group()


def _watch(channel: Channel, is_ended: threading.Event, free: Callable[[], None]) -> None:
    while not is_ended.is_set():
        if channel.is_cut(WATCH_INTERVAL):
            if not is_ended.wait(DETECTION_TIMEOUT):
                free()
            return


def _check_place(size: int, device: torch.device) -> None:
    launched = os.environ.get("WORLD_SIZE", "1")
    if launched != "1" or dist.is_initialized():
        found = f"WORLD_SIZE={launched}" if launched != "1" else "a process group"
        raise UserError(
            "IDLM-0427",
            f"tensor_parallel={size} starts its own ranks, but there is {found} in this process already",
            fix="start one process without torchrun; close() an earlier tensor-parallel engine first",
        )
    if device.type == "cuda" and (device.index or torch.cuda.device_count() < size):
        raise UserError(
            "IDLM-0425",
            f"tensor_parallel={size} uses cuda:0 to cuda:{size - 1}; torch sees {torch.cuda.device_count()} "
            f"GPUs, and device={device}",
            fix="give a smaller tensor_parallel, and device=cuda; choose GPUs by CUDA_VISIBLE_DEVICES",
        )


def _start_rank(hello: Message, end: contextlib.ExitStack) -> tuple[Channel, subprocess.Popen[bytes]]:
    ours, theirs = socket.socketpair()
    module = ["-m", "idlm.infer.distributed.rank", str(theirs.fileno()), str(os.getpid())]
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-P", "-W", "ignore", *module],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            # Answers belong to rank 0's standard output.
            stdout=sys.__stderr__.fileno() if sys.__stderr__ is not None else subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
            # A Ctrl-C in the terminal is for rank 0.
            start_new_session=True,
        )
    channel = Channel(ours)
    end.callback(_wait_for, process)
    end.callback(channel.close)
    channel.send(hello)
    return channel, process


def _wait_for(process: subprocess.Popen[bytes]) -> None:
    """Reap a rank whose channel is closed."""
    try:
        process.wait(SHUTDOWN_TIMEOUT)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _how_it_ended(process: subprocess.Popen[bytes]) -> str:
    try:
        status = process.wait(SHUTDOWN_TIMEOUT)
    except subprocess.TimeoutExpired:
        return f" (pid {process.pid}: it hangs)"
    how = f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
    return f" (pid {process.pid}: {how})"


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """SIGINT and SIGTERM that come meanwhile take effect afterwards. Other threads than the main one get none
    anyway.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        came.append(number)

    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    # None: a handler that was not installed from Python and could not be put back.
    handlers = {number: handler for number, handler in handlers.items() if handler is not None}
    for number in handlers:
        signal.signal(number, note)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for came_number in came:
            signal.raise_signal(came_number)
