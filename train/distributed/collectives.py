"""Communication between the ranks of one run apart from gradients: flags, objects, results of rank 0.

Control messages use a gloo group, so that the check "did any rank receive a signal?" never waits for a GPU.
torch.distributed serializes the objects. In a run of one process nothing here communicates."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch import distributed as dist

from idlm.errors import UserError
from idlm.log import note_progress, progress_count

T = TypeVar("T")


def is_distributed() -> bool:
    """Whether this run has more than one process."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def all_reduce(tensor: Tensor) -> None:
    """Sum `tensor` in place over all ranks; does nothing in a run of one process."""
    if is_distributed():
        dist.all_reduce(tensor)


def barrier() -> None:
    if is_distributed():
        dist.barrier(group=control_group())


def highest(value: int) -> int:
    """The largest `value` of any rank. Collective, and without a GPU."""
    if not is_distributed():
        return value
    found = torch.tensor(value)
    dist.all_reduce(found, op=dist.ReduceOp.MAX, group=control_group())
    return int(found)


def gather_objects(value: T, *, group: dist.ProcessGroup | None = None) -> list[T]:
    """`value` of every rank, in order of rank. Collective in `group`, None: the control group."""
    if not is_distributed():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value, group=group or control_group())
    return values


def raise_together(failure: Exception | None, *, group: dist.ProcessGroup | None = None) -> None:
    """Raise a UserError of any rank on every rank; the ranks without one give None. Collective.

    A rank with another exception raises it alone; the watchdog ends the ranks that wait for it."""
    if failure is not None and not isinstance(failure, UserError):
        raise failure
    for found in gather_objects(failure, group=group):
        if found is not None:
            raise found


def from_rank_zero(compute: Callable[[], T], *, group: dist.ProcessGroup | None = None) -> T:
    """Run `compute` on rank 0 and return its result on every rank. Every rank raises a UserError of rank 0.

    Rank 0 alone raises any other exception; the watchdog ends the ranks that wait for it. Collective in
    `group`, None: the control group."""
    if not is_distributed():
        return compute()
    sent: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            sent[0] = compute()
        except UserError as error:
            sent[1] = error
    dist.broadcast_object_list(sent, src=0, group=group or control_group())
    result, failure = sent
    if failure is not None:
        raise failure
    return cast("T", result)


def control_group() -> dist.ProcessGroup | None:
    """The gloo group for tensors on the host; None: the default one. The first call is collective."""
    return None if dist.get_backend() == "gloo" else _gloo_group(dist.group.WORLD)


def group_of_own(*, timeout: timedelta) -> dist.ProcessGroup | None:
    """A gloo group for another thread than the main one: two threads may not use one group. Collective."""
    return dist.new_group(backend="gloo", timeout=timeout) if is_distributed() else None


@functools.lru_cache(maxsize=1)
def _gloo_group(world: dist.ProcessGroup) -> dist.ProcessGroup:
    """A group next to `world`: a process group that is opened later gets its own."""
    return dist.new_group(backend="gloo")


SECONDS_BETWEEN_SIGNS = 5.0


def while_others_wait(work: Callable[[], None] | None) -> None:
    """Do `work` (None: wait for ranks that have some, at any length); UserErrors are raised on all ranks.

    Collective calls at short intervals keep the process group from timing out, and the watchdog from ending
    the ranks that wait."""
    failures: list[Exception] = []

    def guarded() -> None:
        try:
            if work is not None:
                work()
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=guarded, name="open data", daemon=True)
    thread.start()
    heard = -1
    while heard:
        thread.join(timeout=SECONDS_BETWEEN_SIGNS if work is not None else 0.0)
        is_working = work is not None and thread.is_alive()
        before, heard = heard, highest(1 + progress_count() if is_working else 0)
        if not is_working and heard > before:
            # Progress of the rank that this one waits for counts as progress here: it is no hang.
            note_progress()
    # After an unexpected error the other ranks wait here; the watchdog ends them.
    raise_together(failures[0] if failures else None)
