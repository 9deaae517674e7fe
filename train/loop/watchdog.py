"""Ends all ranks when one of them dies, fails or hangs, and reports which one.

Every rank writes a heartbeat with its position into a store each second. A
thread on every rank reads the heartbeats of the others:

- A process that ended on the same host is found within seconds.
- A stopped process or a lost host is found after `SILENT_SECONDS`.
- A rank whose launcher has ended is sent SIGTERM: it saves and ends, and so do the other ranks.
- A rank hangs if it makes no progress for `train.hang_seconds`, or for `SLOW_FACTOR` times as long in a phase
  that reads or writes files. The report names the rank that is furthest back and prints its stack.

Tokenising counts as progress (`idlm.log.note_progress`), also on the ranks that wait for it. torchrun and
deepspeed also end all ranks when one exits, but do not report why. The exit status is `STATUS`."""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import psutil
from torch import distributed as dist
from torch.distributed import TCPStore
from transformers import TrainerCallback, TrainerState

from idlm.errors import UserError
from idlm.log import progress_count
from idlm.train.distributed.collectives import barrier, from_rank_zero, gather_objects, is_distributed

log = logging.getLogger(__name__)
STATUS = 75
STORE_SECONDS = 10.0
"""How long a call of the store waits for rank 0."""
HEARTBEAT_SECONDS = 1.0
SILENT_SECONDS = 40.0
LINGER_SECONDS = 3.0
SLOW_FACTOR = 6
# In the order of the loop: of two ranks in the same step, the one in the earlier phase is further back.
PHASES = ("start", "save", "export", "data", "compute", "finish")
SLOW_PHASES = ("start", "save", "export", "finish")
VERDICT = "verdict"


@dataclass(slots=True, kw_only=True)
class Heartbeat:
    """The state that a rank publishes. `count` grows each second, `progress_count` with every piece of
    work."""

    rank: int
    pid: int
    host: str
    count: int = 0
    progress_count: int = 0
    step: int = 0
    phase: str = PHASES[0]
    failure_message: str = ""
    is_done: bool = False

    def progress(self) -> tuple[int, int]:
        """Sort key: how far the rank got."""
        return self.step, PHASES.index(self.phase)

    def where(self) -> str:
        return f"rank {self.rank} (pid {self.pid} on {self.host}) in step {self.step + 1}, {self.phase}"


@dataclass(slots=True)
class PeerStatus:
    """The newest heartbeat of a rank. `alive_at` and `moved_at`: when (monotonic seconds) its `count` and its
    `progress_count` last changed."""

    heartbeat: Heartbeat
    alive_at: float = field(default_factory=time.monotonic)
    moved_at: float = field(default_factory=time.monotonic)


class Watchdog(TrainerCallback):
    """Watches the ranks of a run. The main thread calls `move` and the callbacks; only the watching thread
    uses the store. `launcher`: process id of the parent, if the run must not outlive it."""

    def __init__(
        self,
        store: Any,
        *,
        rank: int,
        world_size: int,
        hang_seconds: float,
        clock: Callable[[], float] = time.monotonic,
        launcher: int | None = None,
    ) -> None:
        self.launcher = launcher
        self.is_stopping: Callable[[], bool] = lambda: False
        self.store, self.world_size, self.hang_seconds, self.clock = store, world_size, hang_seconds, clock
        self.mine = Heartbeat(rank=rank, pid=os.getpid(), host=_host())
        self.seen = {rank: PeerStatus(self.mine, clock(), clock())}
        self._num_noted = progress_count()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def start(self) -> None:
        """Begin to watch once every rank has a heartbeat in the store. Collective."""
        self._publish()
        barrier()
        self._thread.start()

    def move(self, phase: str, step: int | None = None) -> None:
        """Record that this rank is in `phase` of the step after `step` finished ones."""
        assert phase in PHASES, f"{phase=}"
        self.mine.phase = phase
        self.mine.step = self.mine.step if step is None else step
        self.mine.progress_count += 1

    def end(self, failure_message: str = "") -> None:
        """Stop watching. `failure_message`: why this rank ends early; the other ranks report it."""
        self.mine.failure_message, self.mine.is_done = failure_message, not failure_message
        self._ending.set()
        self._thread.join(timeout=STORE_SECONDS)

    def wait_for_verdict(self, seconds: float) -> None:
        """Wait: if another rank is the cause, the thread detects it and ends this process."""
        self._thread.join(timeout=seconds)

    def on_step_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self.move("compute", state.global_step)

    on_substep_end = on_step_begin

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self.move("data", state.global_step)

    def _watch(self) -> None:
        while not self._ending.wait(HEARTBEAT_SECONDS):
            self.mine.count += 1
            with contextlib.suppress(RuntimeError):
                self._exchange()
            if self._ending.is_set():
                break
            self._follow_launcher()
            verdict = self._judge()
            if verdict is not None:
                self._execute(*verdict)
        with contextlib.suppress(RuntimeError):
            self._publish()

    def _follow_launcher(self) -> None:
        # Not PR_SET_PDEATHSIG: that signal comes when the thread ends that has started this process, and a
        # launcher may start processes from a thread.
        if self.launcher is not None and os.getppid() != self.launcher:
            what = f"the launcher (pid {self.launcher}) has ended: this rank saves and ends"
            print(f"watchdog on rank {self.mine.rank}: {what}", file=sys.stderr, flush=True)
            self.launcher = None
            # A second signal would end a save that has begun.
            if not self.is_stopping():
                os.kill(os.getpid(), signal.SIGTERM)

    def _publish(self) -> None:
        if self.store is not None:
            self.store.set(f"beat/{self.mine.rank}", json.dumps(asdict(self.mine)))

    def _exchange(self) -> None:
        now, num_noted = self.clock(), progress_count()
        self.mine.progress_count += num_noted - self._num_noted
        self._num_noted = num_noted
        self._publish()
        beats = [self.mine]
        if self.store is not None:
            texts = self.store.multi_get([f"beat/{rank}" for rank in range(self.world_size)])
            beats = [Heartbeat(**json.loads(text)) for text in texts]
        for beat in beats:
            known = self.seen.setdefault(beat.rank, PeerStatus(beat, now, now))
            if beat.count != known.heartbeat.count or beat.rank == self.mine.rank:
                known.alive_at = now
            if beat.progress_count != known.heartbeat.progress_count:
                known.moved_at = now
            # A copy: the main thread changes this rank's own heartbeat.
            known.heartbeat = Heartbeat(**asdict(beat))

    def _judge(self) -> tuple[str, list[Heartbeat]] | None:
        """(what happened, the ranks that caused it), or None while every rank is fine."""
        now = self.clock()
        running = [known for known in self.seen.values() if not known.heartbeat.is_done]
        others = [known.heartbeat for known in running if known.heartbeat.rank != self.mine.rank]
        for beat in others:
            if beat.failure_message:
                return f"{beat.where()} failed: {beat.failure_message}", [beat]
        for beat in others:
            if beat.host == self.mine.host and has_ended(beat.pid):
                return f"{beat.where()} died without a word (killed?)", [beat]
        silent = [beat for beat in others if now - self.seen[beat.rank].alive_at > SILENT_SECONDS]
        if silent:
            names = "; ".join(beat.where() for beat in silent)
            return f"{names}: silent for {SILENT_SECONDS:.0f} s (stopped, host or network lost)", silent
        stuck = []
        for known in running:
            factor = SLOW_FACTOR if known.heartbeat.phase in SLOW_PHASES else 1
            if now - known.moved_at > self.hang_seconds * factor:
                stuck.append(known)
        if not stuck:
            return None
        seconds = now - min(known.moved_at for known in stuck)
        beats = [known.heartbeat for known in running]
        minimum = min(beat.progress() for beat in beats)
        last = [beat for beat in beats if beat.progress() == minimum]
        states = "; ".join(beat.where() for beat in beats)
        if len(last) == len(beats) > 1:
            return f"no rank moved for {seconds:.0f} s, and all are in the same place: {states}", last
        named = "; ".join(beat.where() for beat in last)
        return f"{named} hangs: no progress for {seconds:.0f} s (all: {states})", last

    def _execute(self, what: str, culprits: list[Heartbeat]) -> None:
        """Agree with the others on the first verdict, print it, and end this process."""
        names = {beat.rank for beat in culprits}
        with contextlib.suppress(RuntimeError):
            if self.store is not None:
                what = self.store.compare_set(VERDICT, "", what).decode()
        if any(beat.failure_message for beat in culprits) and self._ending.wait(LINGER_SECONDS):
            # The same failure ended the main thread, which prints its own message.
            return
        text = f"watchdog on rank {self.mine.rank}: {what}; all ranks end with status {STATUS}"
        print(text, file=sys.stderr, flush=True)
        if self.mine.rank in names:
            faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
        for beat in culprits:
            if beat.host == self.mine.host and beat.rank != self.mine.rank and not beat.failure_message:
                # A stopped process does not end by itself and would hold its memory.
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(beat.pid, signal.SIGKILL)
        if self.mine.rank == 0 and self.store is not None:
            # The other ranks still read the verdict from the store in this process.
            time.sleep(LINGER_SECONDS)
        os._exit(STATUS)


@contextlib.contextmanager
def watching(hang_seconds: float, *, launcher: int | None = None) -> Iterator[Watchdog]:
    """A watchdog over the ranks of the open process group, and over the process that has started them. The
    other ranks get the message of an exception that is raised inside."""
    watchdog = Watchdog(
        _open_store() if is_distributed() else None,
        rank=dist.get_rank() if is_distributed() else 0,
        world_size=dist.get_world_size() if is_distributed() else 1,
        hang_seconds=hang_seconds,
        launcher=launcher,
    )
    watchdog.start()
    try:
        yield watchdog
    except UserError as error:
        watchdog.end(failure_message=str(error).splitlines()[0])
        raise
    except BaseException as error:
        if is_distributed():
            # Collectives fail here if another rank died: the watchdog then names that rank.
            watchdog.wait_for_verdict(LINGER_SECONDS)
        watchdog.end(failure_message=f"{type(error).__name__}: {error}".splitlines()[0])
        raise
    watchdog.end()


def _open_store() -> TCPStore | None:
    """Open this rank's client of a store on rank 0, which needs no collective calls; None on all ranks if one
    cannot reach it. Collective."""
    host = os.environ.get("MASTER_ADDR", "127.0.0.1")
    timeout = datetime.timedelta(seconds=STORE_SECONDS)
    held: list[TCPStore] = []

    def hold() -> int:
        held.append(TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timeout))
        return held[0].port

    port = from_rank_zero(hold)
    store = held[0] if held else None
    with contextlib.suppress(RuntimeError):
        store = store or TCPStore(host, port, is_master=False, timeout=timeout)
    unreachable = [rank for rank, reached in enumerate(gather_objects(store is not None)) if not reached]
    if unreachable:
        log.warning(
            "ranks %s cannot reach %s:%d: a rank that dies or hangs is not named", unreachable, host, port
        )
    return None if unreachable else store


def _host() -> str:
    """Host name and PID namespace: equal for processes that see each other's process ids."""
    space = os.readlink("/proc/self/ns/pid") if os.path.exists("/proc/self/ns/pid") else ""
    return f"{socket.gethostname()} {space}".strip()


def has_ended(pid: int) -> bool:
    """Whether the process is gone or a zombie."""
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.Error as error:
        return isinstance(error, psutil.NoSuchProcess)
