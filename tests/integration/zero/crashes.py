"""Training runs in forked processes that are killed at chosen points; `benchmarks.resume` kills them too.

The parent has imported everything and computed nothing, so a run costs its own seconds and not those of
imports. A child records the data items of every step, and can die at its k-th change of a file
below the run's folder: before opening for writing, between creating and filling, before rename, fsync, link,
unlink and exchange, and in the middle of a torch or safetensors file. The product contains none of this code.
"""

from __future__ import annotations

import builtins
import collections
import io
import json
import os
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WRITING = ("w", "a", "x", "+")
MOVES = ("rename", "replace", "link", "unlink", "remove", "rmdir", "mkdir", "fsync", "chmod")


@dataclass(frozen=True, slots=True, kw_only=True)
class CrashPlan:
    """Plan for one rank: nothing, or death at its `point`-th change (1-based) once `step` is reached.

    `counts` only writes the list of points to `<trace>/points-<rank>.jsonl`."""

    rank: int = 0
    step: int = 0
    point: int | None = None
    counts: bool = False


def start(
    argv: list[str], *, world_size: int, trace: Path, plan: CrashPlan | None = None, log: Path | None = None
) -> list[int]:
    """Fork one process per rank that runs `idlm-train argv`; returns their ids."""
    assert threading.active_count() == 1, "a fork copies no thread"
    port = free_port()
    trace.mkdir(parents=True, exist_ok=True)
    pids = []
    for rank in range(world_size):
        pid = os.fork()
        if pid == 0:
            _child(argv, rank, world_size, port, trace, plan, log)
        pids.append(pid)
    return pids


def wait(pids: list[int], *, seconds: float) -> dict[int, int]:
    """Exit status by process (negative: the signal); processes left after `seconds` are killed."""
    status: dict[int, int] = {}
    end = time.monotonic() + seconds
    while len(status) < len(pids):
        for pid in set(pids) - status.keys():
            found, raw = os.waitpid(pid, os.WNOHANG)
            if found:
                status[pid] = os.waitstatus_to_exitcode(raw)
        if time.monotonic() > end:
            kill(pids, status)
        time.sleep(0.005)
    return status


def wait_for_first(pids: list[int], *, seconds: float) -> dict[int, int]:
    """Wait until one process has ended, then kill the others at once, as if the machine failed."""
    status: dict[int, int] = {}
    end = time.monotonic() + seconds
    while not status and time.monotonic() < end:
        for pid in pids:
            found, raw = os.waitpid(pid, os.WNOHANG)
            if found:
                status[pid] = os.waitstatus_to_exitcode(raw)
        time.sleep(0.002)
    kill(pids, status)
    for pid in set(pids) - status.keys():
        status[pid] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return status


def kill(pids: list[int], ended: dict[int, int]) -> None:
    """Send SIGKILL to our children that have not been waited for."""
    for pid in set(pids) - ended.keys():
        os.kill(pid, signal.SIGKILL)


def _child(
    argv: list[str],
    rank: int,
    world_size: int,
    port: int,
    trace: Path,
    plan: CrashPlan | None,
    log: Path | None,
) -> None:
    status = 1
    try:
        output = os.open(log or os.devnull, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(output, 1)
        os.dup2(output, 2)
        if world_size > 1:
            variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "MASTER_PORT": port}
            os.environ.update({name: str(value) for name, value in variables.items()})
            os.environ["MASTER_ADDR"] = "127.0.0.1"
        from idlm.train import cli

        directory = next(item.partition("=")[2] for item in argv if item.startswith("output_dir="))
        record_items(trace, rank)
        if plan is not None and plan.rank == rank:
            _plan_death(plan, Path(directory).resolve(), trace)
        status = cli.main(argv)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def record_items(trace: Path, rank: int) -> None:
    """Append {"step", "micro_batch", "items"} for every micro-batch that is trained on."""
    from idlm.train.loop.trainer import IdlmTrainer

    plain = IdlmTrainer.compute_loss
    path = trace / f"items-{rank}.jsonl"
    seen: collections.Counter[int] = collections.Counter()

    def recorded(self: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        step = self.state.global_step + 1
        line = {"step": step, "micro_batch": seen[step], "items": inputs["item_ids"].tolist()}
        seen[step] += 1
        with builtins.open(path, "a") as file:
            file.write(json.dumps(line) + "\n")
        return plain(self, model, inputs, *args, **kwargs)

    setattr(IdlmTrainer, "compute_loss", recorded)  # noqa: B010  (mypy refuses to see a method replaced)


def _plan_death(plan: CrashPlan, directory: Path, trace: Path) -> None:
    """Count every change below `directory` from the end of step `plan.step` on, and die at the chosen one."""
    from idlm.train.checkpoint.export import StageExports

    counter = _Counter(plan, directory, trace / f"points-{plan.rank}.jsonl")
    plain = StageExports.on_step_end

    def armed(self: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        counter.is_armed = counter.is_armed or state.global_step >= plan.step
        return plain(self, args, state, control, **kwargs)

    setattr(StageExports, "on_step_end", armed)  # noqa: B010
    _wrap_os(counter)
    _wrap_writers(counter)


class _Counter:
    def __init__(self, plan: CrashPlan, directory: Path, list_path: Path) -> None:
        self.plan, self.prefix, self.list_path = plan, str(directory), list_path
        self.count, self.is_armed = 0, False
        self.plain_open = builtins.open

    def covers(self, where: Any) -> bool:
        if not self.is_armed:
            return False
        try:
            if isinstance(where, int):
                return os.readlink(f"/proc/self/fd/{where}").startswith(self.prefix)
            return os.path.abspath(os.fspath(where)).startswith(self.prefix)
        except (OSError, TypeError):
            return False

    def point(self, what: str, where: Any) -> None:
        """Count one more point; the process dies here if it is the chosen one."""
        if not self.covers(where):
            return
        self.count += 1
        if self.plan.counts:
            where = os.readlink(f"/proc/self/fd/{where}") if isinstance(where, int) else where
            with self.plain_open(self.list_path, "a") as file:
                file.write(json.dumps({"point": self.count, "what": what, "place": str(where)}) + "\n")
        if self.count == self.plan.point:
            os.kill(os.getpid(), signal.SIGKILL)


def _wrap_os(counter: _Counter) -> None:
    def before(name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(where: Any, *args: Any, **kwargs: Any) -> Any:
            # A name relative to an open folder (rmtree) belongs to the tree if the folder does.
            folder = kwargs.get("dir_fd")
            counter.point(f"before {name}", where if folder is None else folder)
            return plain(where, *args, **kwargs)

        return wrapped

    for name in MOVES:
        setattr(os, name, before(name, getattr(os, name)))
    plain_open, plain_os_open = io.open, os.open

    def opened(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        writes = any(letter in mode for letter in WRITING)
        if writes:
            counter.point("before open", file)
        handle = plain_open(file, mode, *args, **kwargs)
        if writes:
            counter.point("after open, before the content of", file)
        return handle

    def os_opened(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        writes = flags & (os.O_WRONLY | os.O_RDWR)
        if writes:
            counter.point("before os.open", path)
        return plain_os_open(path, flags, *args, **kwargs)

    builtins.open = io.open = opened
    os.open = os_opened


def _wrap_writers(counter: _Counter) -> None:
    """Wrap writers that do not use Python's `open`: files may be whole, torn or missing."""
    import torch
    from transformers import modeling_utils

    import idlm.publish as publishing

    def torn(name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(value: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
            counter.point(f"before {name}", f)
            result = plain(value, f, *args, **kwargs)
            if counter.covers(f) and counter.count + 1 == counter.plan.point:
                os.truncate(f, os.path.getsize(f) // 2)
            counter.point(f"in the middle of {name}", f)
            return result

        return wrapped

    torch.save = torn("torch.save", torch.save)
    modeling_utils.safe_save_file = torn("safetensors", modeling_utils.safe_save_file)
    plain_exchange = publishing._exchange

    def exchanged(a: Path, b: Path) -> bool:
        counter.point("before exchange", a)
        done = plain_exchange(a, b)
        counter.point("after exchange", a)
        return done

    publishing._exchange = exchanged


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
