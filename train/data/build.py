"""From records to a cache: every record is checked and tokenised once, before training, in one or more
processes.

A bad record ends the run with an error that names it, or is skipped and counted (`data.on_bad_record`). The
cache depends neither on the number of processes nor on how often the build was stopped: finished parts are
kept."""

from __future__ import annotations

import contextlib
import itertools
import logging
import multiprocessing
import os
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from idlm.errors import UserError
from idlm.files.records import SUFFIXES, Reader, reading
from idlm.log import note_progress
from idlm.train.config.data import MAX_DEFAULT_WORKERS, DataConfig
from idlm.train.data.base import SOURCES, Encoder
from idlm.train.data.cache import (
    CachedSource,
    Counts,
    Encoded,
    cache_key,
    intact_parts,
    open_cache,
    pack,
    part_folder,
    write_part,
)
from idlm.train.data.records.detect import check_shape, detect_shape, ignored_keys, is_read, samples_of
from idlm.train.data.records.shapes import SHAPES

log = logging.getLogger(__name__)
FileReaders = TypeVar("FileReaders", bound=Callable[..., Reader])
DEFAULT_CACHE = "outputs/data_cache"
PART_TOKENS = 1 << 24
"""64 MiB of packed tokens, about a minute of one process: what a killed build loses at most."""
BATCH_RECORDS = 64
BYTES_ALONE = 1 << 21
"""Bytes of packed tokens that this process makes first without `data.workers`: starting others for less is
slower."""
SECONDS_BETWEEN_LINES = 10.0


def cache_folder(config: DataConfig) -> Path:
    return Path(config.cache_dir or DEFAULT_CACHE)


def file_source(name: str) -> Callable[[FileReaders], FileReaders]:
    """Return a decorator of the readers of files with the endings `SUFFIXES[name]`, which adds their records
    as the source `name`."""

    def add(reader: FileReaders) -> FileReaders:
        SOURCES.register(name)(
            lambda config, encoder: cached_source(reader(config.path, SUFFIXES[name]), config, encoder)
        )
        return reader

    return add


def cached_source(reader: Reader, config: DataConfig, encoder: Encoder) -> CachedSource:
    """Return the samples of `reader` from the cache, which is built where it is missing or damaged.

    The key covers the content of the files, the tokenizer, the template and each setting that changes a
    sample; the mask token is not part of it, so UserError IDLM-0206 is raised here where the data contains
    it."""
    settings = [config.source, config.shape, config.on_bad_record, encoder.use_chat_template, PART_TOKENS]
    key = cache_key([reader.identity(), encoder.fingerprint(), *settings])
    directory = cache_folder(config) / key[:32]
    source = None
    with reading(directory):
        try:
            source = open_cache(directory)
        except UserError as error:
            log.warning("the data cache %s is damaged (%s) and is built again", directory, error.message)
    if source is None:
        build_cache(reader, config, encoder, directory=directory)
        source = open_cache(directory)
        assert source is not None, f"{directory=} was completed a moment ago"
    # Data that was moved has the same key, and its names of now.
    source.header |= {name: list(getattr(reader, name)) for name in ("names", "files", "left_out")}
    if encoder.mask_token_id is not None:
        source.refuse_token(encoder.mask_token_id)
    return source


def build_cache(reader: Reader, config: DataConfig, encoder: Encoder, *, directory: Path) -> None:
    """Encode all records that no intact part in `directory` has; the first bad one raises its UserError."""
    with reading(directory):
        parts = intact_parts(directory)
    if parts and parts[-1]["is_last"]:
        return
    counts, num_parts = Counts(), len(parts)
    if parts:
        counts = Counts(**{name: parts[-1][name] for name in Counts.__dataclass_fields__})
        log.info("tokenising continues after %s records in %s", f"{counts.num_records:,}", directory)
    tasks = _tasks(reader, config)
    for _ in itertools.islice(tasks, counts.num_records):
        note_progress()
    waiting: list[Encoded] = []
    start = logged = time.monotonic()
    num_written = counts.num_tokens
    for done in _encoded(tasks, encoder, config.workers):
        note_progress()
        if done.error is not None and config.on_bad_record == "error":
            _remove_parts(directory, num_parts)
            raise done.error
        counts.add(done)
        waiting.append(done)
        if counts.num_tokens - num_written >= PART_TOKENS:
            part = part_folder(directory, num_parts)
            write_part(part, waiting, counts, names=reader.names, is_last=False)
            num_parts, num_written, waiting = num_parts + 1, counts.num_tokens, []
        if time.monotonic() - logged > SECONDS_BETWEEN_LINES:
            logged = time.monotonic()
            log.info(
                "tokenising %s: %.0f %%, %s records, %s tokens, %.0f s",
                config.path,
                100 * reader.share_read,
                f"{counts.num_records:,}",
                f"{counts.num_tokens:,}",
                logged - start,
            )
    if not counts.num_samples:
        _remove_parts(directory, num_parts)
        bad = counts.skipped_examples
        example = f"; the first of {counts.num_skipped} bad records: {bad[0]}" if bad else ""
        raise UserError(
            "IDLM-0208",
            f"{config.path} has no samples{example}",
            fix=f"give records of one of the shapes: {', '.join(shape.example for shape in SHAPES.values())}",
        )
    write_part(part_folder(directory, num_parts), waiting, counts, names=reader.names, is_last=True)
    if counts.num_skipped:
        log.warning("%d of %d records are bad and were skipped", counts.num_skipped, counts.num_records)


def _remove_parts(directory: Path, num_parts: int) -> None:
    """Remove the parts of data with a mistake: corrected data has another key and would never use them.
    Another process that builds the same cache meets the same mistake."""
    for index in reversed(range(num_parts)):
        shutil.rmtree(part_folder(directory, index), ignore_errors=True)
    with contextlib.suppress(OSError):
        directory.rmdir()


def _tasks(reader: Reader, config: DataConfig) -> Iterator[Encoded]:
    """Yield what is to be encoded of each record, or its error where it lacks the shape of the source."""
    shape = first = ""
    for row in reader.rows():
        origin = f"{reader.names[row.file]}:{row.number}"
        task = Encoded(file=row.file, number=row.number, origin=origin)
        try:
            if isinstance(row.value, UserError):
                raise row.value
            if not shape:
                shape, first = detect_shape(row.value, config.shape, origin=origin), origin
            check_shape(row.value, shape, config.shape, origin=origin, first=first)
        except UserError as error:
            # A new one: what was raised holds the record.
            yield replace(task, error=UserError(error.code, error.message, fix=error.fix))
        else:
            record = {name: value for name, value in row.value.items() if is_read(name, shape)}
            ignored = (*ignored_keys(row.value, shape), *row.unread)
            yield replace(task, shape=shape, record=record, ignored=ignored)


def _encoded(tasks: Iterator[Encoded], encoder: Encoder, workers: int | None) -> Iterator[Encoded]:
    default = min(MAX_DEFAULT_WORKERS, len(os.sched_getaffinity(0)))
    num_workers = default if workers is None else workers
    num_alone = BYTES_ALONE if workers is None else 0
    for task in tasks:
        if num_workers > 1 and num_alone <= 0:
            yield from _encoded_by_workers(itertools.chain([task], tasks), encoder, num_workers)
            return
        done = encode(encoder, task)
        num_alone -= sum(packed.nbytes for packed in done.samples)
        yield done


def _encoded_by_workers(tasks: Iterator[Encoded], encoder: Encoder, num_workers: int) -> Iterator[Encoded]:
    # A fork would copy this process with its threads and GPU context. The fork server is a fresh process that
    # imports what workers need once for all of them.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, type(encoder.tokenizer).__module__])
    with ProcessPoolExecutor(
        num_workers, mp_context=context, initializer=_start_worker, initargs=(encoder,)
    ) as pool:
        waiting: deque[Future[list[Encoded]]] = deque()
        try:
            for batch in iter(lambda: list(itertools.islice(tasks, BATCH_RECORDS)), []):
                waiting.append(pool.submit(_encode_batch, batch))
                if len(waiting) >= 4 * num_workers:
                    yield from waiting.popleft().result()
            while waiting:
                yield from waiting.popleft().result()
        except BrokenProcessPool as error:
            raise UserError(
                "IDLM-0241",
                "a process that tokenises the data was killed, often because memory is short",
                fix="start the same command again, which continues after the last finished part; if memory "
                "is short, give fewer processes: data.workers=1",
            ) from error
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


_WORKER: list[Encoder] = []


def _start_worker(encoder: Encoder) -> None:
    _WORKER[:] = [encoder]


def _encode_batch(tasks: Sequence[Encoded]) -> list[Encoded]:
    return [encode(_WORKER[0], task) for task in tasks]


def encode(encoder: Encoder, task: Encoded) -> Encoded:
    if task.error is not None:
        return task
    origin = task.origin
    try:
        made, ignored_in_turns = samples_of(task.record, task.shape, encoder, origin=origin)
    except UserError as error:
        message = error.message if origin in error.message else f"{origin}: {error.message}"
        return replace(task, record={}, ignored=(), error=UserError(error.code, message, fix=error.fix))
    except (TypeError, UnicodeEncodeError) as error:
        # Half of a surrogate pair is valid in JSON and invalid as text.
        message = f"{origin} has text that the tokenizer refuses, such as half of a surrogate pair: {error}"
        refused = UserError("IDLM-0202", message, fix="write UTF-8")
        return replace(task, record={}, ignored=(), error=refused)
    return replace(
        task,
        record={},
        samples=tuple(map(pack, made)),
        ignored=(*task.ignored, *sorted(ignored_in_turns)),
        notes=tuple(sorted({note for sample in made for note in sample.notes})),
    )
