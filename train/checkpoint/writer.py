"""Writes and publishes the files of a checkpoint: at once, or in a thread during training.

`train.save=sync` writes each part where it is put. `train.save=async` copies a part into host memory (pinned
where it comes from a GPU), and a thread of each rank writes the copies once all of them are made. Files,
manifest and publication are the same, and so is the code that writes them. The copies' memory is allocated by
a thread early in the run, and reused for all saves. A thread is enough: torch, safetensors and hashlib
release the GIL while they write and hash.

DeepSpeed has writers of its own, which publish nothing atomically: here it makes its state as always, and
hands it to `put`, file by file, in place of `torch.save`."""

from __future__ import annotations

import contextlib
import copy
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
from torch import Tensor, nn

from idlm.errors import UserError
from idlm.files.disk import translate_disk_errors
from idlm.log import note_progress
from idlm.train.distributed.collectives import from_rank_zero, group_of_own, raise_together

log = logging.getLogger(__name__)
SAVE_MODES = ("sync", "async")
USABLE_SHARE = 0.9
"""Share of the host memory that is available that copies may take."""
LINGER_SECONDS = 10.0
"""How long a run that ends by an unexpected error or a second signal waits for a save."""
PEER_TIMEOUT = timedelta(days=1)
"""Ranks may write for hours; the watchdog detects those that have died."""


class Buffer(NamedTuple):
    num_bytes: int
    is_pinned: bool


class CheckpointWriter:
    """Writes one checkpoint at a time. `num_sharing`: how many ranks of this host copy state at once.

    Creating one is collective, as are `publish` and `wait`."""

    def __init__(self, mode: str, *, num_sharing: int = 1) -> None:
        assert mode in SAVE_MODES, f"{mode=}"
        self.is_async, self.num_sharing = mode == "async", num_sharing
        self.times: list[float] = []
        """Seconds until each save was published."""
        self._group = group_of_own(timeout=PEER_TIMEOUT) if self.is_async else None
        self._writes: list[Callable[[], None]] = []
        self._buffers: dict[tuple[str, int], Tensor] = {}
        self._expected: dict[str, list[Buffer]] | None = None
        self._allocating: threading.Thread | None = None
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None
        self._is_ending = False
        self._began = 0.0

    @property
    def has_failed(self) -> bool:
        """Whether `wait` would raise; a running save has not failed yet."""
        return self._failure is not None

    @property
    def is_saving(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def begin(self) -> None:
        """Wait for the save before, and raise its error. Collective."""
        self._began = time.monotonic()
        self.wait()
        if self._allocating is not None:
            self._allocating.join()
        self._writes, self._allocating = [], None

    @contextlib.contextmanager
    def expecting(self) -> Iterator[None]:
        """What is `put` inside is not written: a thread allocates the memory for its copies afterwards."""
        expected: dict[str, list[Buffer]] = {}
        self._expected = expected
        try:
            yield
        finally:
            self._expected = None

        def allocate() -> None:
            # Where memory is short, the save will meet it too, and report it.
            with contextlib.suppress(RuntimeError):
                for name, buffers in expected.items():
                    self._allocate(name, buffers)

        self._allocating = threading.Thread(target=allocate, name="memory of saves", daemon=True)
        self._allocating.start()

    def put(self, path: Path, state: Any, write: Callable[[Any], None]) -> None:
        """Let `write(state)` make the file `path`: now, or later with a copy of `state`, a tree of dicts,
        lists and tuples with tensors."""
        if self._expected is not None:
            self._expected[path.name] = [_buffer_for(source) for source in _storages(state).values()]
            return
        copied = self._copied(path.name, state) if self.is_async else None
        if copied is None:
            write(state)
        else:
            self._writes.append(lambda: write(copied))

    def publish(
        self,
        target: Path,
        staging: Path,
        stack: ExitStack,
        complete: Callable[[], None],
        clean_up: Callable[[], None],
    ) -> None:
        """Write on every rank what was put, then `complete` the files in `staging` on rank 0, which closes
        `stack`, so publishes `target`, and cleans up. `wait` raises errors that come later."""

        def work() -> None:
            with stack:
                failure: Exception | None = None
                try:
                    with translate_disk_errors(target, written=staging):
                        for write in self._writes:
                            write()
                            note_progress()
                except Exception as error:
                    failure = error
                raise_together(failure, group=self._group)

                def publish() -> None:
                    complete()
                    stack.pop_all().close()
                    clean_up()

                from_rank_zero(publish, group=self._group)
            self.times.append(time.monotonic() - began)

        def guarded() -> None:
            try:
                work()
            except Exception as error:
                self._failure = error

        began = self._began
        if self.is_async:
            self._thread = threading.Thread(target=guarded, name=f"save {target.name}", daemon=True)
            self._thread.start()
        else:
            work()

    def wait(self) -> None:
        """Wait until the running save is published, and raise its error. Collective."""
        if self._thread is not None:
            self._thread.join()
        self._thread, failure, self._failure = None, self._failure, None
        if failure is not None:
            raise failure

    @contextlib.contextmanager
    def lingering(self) -> Iterator[None]:
        """When training inside ends by an error, finish the running save first: it is worth as much as one
        that training has waited for. After an unexpected error a rank may be missing, which it needs.
        A thread that still computes when the interpreter ends would abort the process (status 134)."""
        try:
            yield
        except BaseException as error:
            self._is_ending = True
            for thread in (self._allocating, self._thread):
                if thread is not None:
                    thread.join(timeout=None if isinstance(error, UserError) else LINGER_SECONDS)
            raise

    def _copied(self, name: str, state: Any) -> Any:
        """A copy of `state` in host memory, in the buffers of the save before; None if it does not fit.

        Tensors that share storage share it in the copy, so that a file holds it once."""
        storages = _storages(state)
        if (
            lacking := self._allocate(name, [_buffer_for(source) for source in storages.values()])
        ) is not None:
            log.warning(
                "the copy of %s needs %.2f GiB of host memory, and %.2f GiB are available: training waits "
                "while it is written, as with train.save=sync",
                *(name, *(amount / 2**30 for amount in lacking)),
            )
            return None
        copies: dict[tuple[str, int], Tensor] = {}
        for index, (key, source) in enumerate(storages.items()):
            copies[key] = self._buffers[name, index].copy_(source)
        # Everything else of `state` is copied too, also what dicts of modules have as attributes.
        return copy.deepcopy(state, {id(tensor): _copy_of(tensor, copies) for tensor in _tensors(state)})

    def _allocate(self, name: str, buffers: list[Buffer]) -> tuple[int, int] | None:
        """Allocate what is missing of the part `name`. If it does not fit: (needed, available) bytes."""
        missing = {
            (name, index): buffer
            for index, buffer in enumerate(buffers)
            if (held := self._buffers.get((name, index))) is None or held.numel() != buffer.num_bytes
        }
        needed = sum(_allocated(buffer) for buffer in missing.values()) * self.num_sharing
        available = host_memory()[0]
        if needed > USABLE_SHARE * available:
            return needed, available
        for key, buffer in missing.items():
            if self._is_ending:
                break
            self._buffers.pop(key, None)
            self._buffers[key] = _host_buffer(buffer)
        return None


def _storages(state: Any) -> dict[tuple[str, int], Tensor]:
    """The bytes of every storage of the tensors in `state`, by position."""
    storages: dict[tuple[str, int], Tensor] = {}
    for tensor in _tensors(state):
        whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
        key = _index(tensor)
        if key not in storages or storages[key].numel() < whole.numel():
            storages[key] = whole
    return storages


def _buffer_for(source: Tensor) -> Buffer:
    return Buffer(source.numel(), source.device.type == "cuda")


def _host_buffer(buffer: Buffer) -> Tensor:
    try:
        return torch.empty(buffer.num_bytes, dtype=torch.uint8, pin_memory=buffer.is_pinned)
    except RuntimeError:
        # The driver, or a limit of locked memory, refuses. The copy is slower then.
        return torch.empty(buffer.num_bytes, dtype=torch.uint8)


def _tensors(state: Any) -> Iterator[Tensor]:
    if isinstance(state, Tensor):
        yield state
    elif isinstance(state, dict | list | tuple):
        for value in state.values() if isinstance(state, dict) else state:
            yield from _tensors(value)


def _index(tensor: Tensor) -> tuple[str, int]:
    return str(tensor.device), tensor.untyped_storage().data_ptr()


def _allocated(buffer: Buffer) -> int:
    """Bytes that torch takes for the buffer: pinned memory comes in powers of two."""
    num_bytes = buffer.num_bytes
    return 1 << (num_bytes - 1).bit_length() if buffer.is_pinned and num_bytes else num_bytes


def _copy_of(tensor: Tensor, copies: dict[tuple[str, int], Tensor]) -> Tensor:
    """`tensor` in the copy of its storage."""
    buffer = copies[_index(tensor)].untyped_storage()
    made = torch.empty(0, dtype=tensor.dtype).set_(
        buffer, tensor.storage_offset(), tensor.shape, tensor.stride()
    )
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(made, requires_grad=tensor.requires_grad)
    return made.requires_grad_(tensor.requires_grad)


def host_memory() -> tuple[int, int]:
    """Bytes of host memory that this process may still take, and all of them: of the machine, and of its
    container."""
    memory, group = psutil.virtual_memory(), Path("/sys/fs/cgroup")
    try:
        limit, used = (int((group / f"memory.{name}").read_text()) for name in ("max", "current"))
        held = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        # No container, or one without a limit.
        return memory.available, memory.total
    # The kernel gives cached files up for a process that needs memory.
    used -= int(held["inactive_file"]) + int(held["active_file"])
    return min(memory.available, limit - used), min(memory.total, limit)
