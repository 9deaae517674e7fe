"""From records to a cache: every record is checked and tokenised once, before training, in one or more
processes.

A bad record ends the run with an error that names it, or is skipped and counted (`data.on_bad_record`). The
cache depends neither on the number of processes nor on how often the build was stopped: finished shards are
kept.
"""

from __future__ import annotations

import itertools
import logging
import multiprocessing
import os
import shutil
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from idlm.errors import UserError
from idlm.files.disk import DISK_CODE
from idlm.publish import publish
from idlm.train.config.data import MAX_DEFAULT_WORKERS
from idlm.train.data.base import Encoder
from idlm.train.data.cache import CachedSource, CacheWriter, cache_key, open_cache, pack
from idlm.train.data.files import Reader, reading
from idlm.train.data.shapes import KEYS, SHAPES, check_same_shape, detect_shape, samples_of
from idlm.train.data.shards import Encoded, Shards
from idlm.train.loop.liveness import note_progress

if TYPE_CHECKING:
    from idlm.train.config.data import DataConfig

log = logging.getLogger(__name__)
ON_BAD_RECORD = ("error", "skip")
DEFAULT_CACHE = "outputs/data_cache"
BATCH_RECORDS = 64
RECORDS_ALONE = 2048
"""Without `data.workers` this process encodes so many records first: starting others for fewer is slower."""
SECONDS_BETWEEN_LINES = 10.0
NUM_EXAMPLES = 5

Task = tuple[int, int, str, dict[str, Any], str]
"""File, place, origin, record and shape of one record to encode."""


@dataclass(slots=True)
class Tally:
    """Counts of a build."""

    shapes: Counter[str] = field(default_factory=Counter)
    num_records: int = 0
    num_skipped: int = 0
    examples: list[str] = field(default_factory=list)

    def skip(self, error: UserError) -> None:
        """Count a bad record."""
        self.num_skipped += 1
        if len(self.examples) < NUM_EXAMPLES:
            self.examples.append(f"{error.code}: {error.message}")


def cache_folder(config: DataConfig) -> Path:
    """Return the folder that holds the caches of a run's data."""
    return Path(config.cache_dir or DEFAULT_CACHE).expanduser()


def cached_source(reader: Reader, config: DataConfig, encoder: Encoder) -> CachedSource:
    """Return the samples of `reader` from the cache, which is built where it is missing or damaged.

    The key covers the content of the files, the tokenizer, the template and each setting that changes a
    sample; the mask token is not part of it, so UserError IDLM-0206 is raised here where the data contains
    it.
    """
    settings = [config.source, config.shape, config.on_bad_record, encoder.use_chat_template]
    key = cache_key([reader.identity(), encoder.fingerprint(), *settings])
    directory = cache_folder(config) / key[:32]
    source = None
    with reading(directory):
        try:
            source = open_cache(directory, key)
        except ValueError as error:
            log.warning("the data cache %s is damaged (%s) and is built again", directory, error)
            shutil.rmtree(directory)
    if source is None:
        build_cache(reader, config, encoder, directory=directory, key=key)
        source = open_cache(directory, key)
        assert source is not None, f"{directory=} was published a moment ago"
    if encoder.mask_token_id is not None:
        source.refuse_token(encoder.mask_token_id)
    return source


def build_cache(reader: Reader, config: DataConfig, encoder: Encoder, *, directory: Path, key: str) -> None:
    """Encode all records and publish the cache; raises the UserError of the first bad record, or skips it.

    Shards that an earlier build of the same cache finished are not encoded again.
    """
    tally, shards = Tally(), Shards(directory.with_name(f"{directory.name}.shards"))
    try:
        with publish(directory) as staging, CacheWriter(staging) as writer:
            _write_samples(writer, reader, config, encoder, tally, shards)
            if not writer.num_samples:
                raise _no_samples(config, tally)
            writer.finish(
                {
                    "key": key,
                    "names": list(reader.names),
                    "shapes": dict(tally.shapes.most_common()),
                    "num_records": tally.num_records,
                    "num_skipped": tally.num_skipped,
                    "skipped_examples": tally.examples,
                }
            )
    except UserError as error:
        if error.code != DISK_CODE:
            # Corrected data has another key, so that these shards would never be used or removed.
            shards.remove()
        raise
    shards.remove()
    if tally.num_skipped:
        log.warning("%d of %d records are bad and were skipped", tally.num_skipped, tally.num_records)


def _write_samples(
    writer: CacheWriter, reader: Reader, config: DataConfig, encoder: Encoder, tally: Tally, shards: Shards
) -> None:
    """Write the samples of all records in order, from shards or from the encoder."""
    start = logged = time.monotonic()
    for done in _from_shards_or_encoded(_tasks(reader, config, tally), encoder, config.workers, shards):
        note_progress()
        if done.error is not None:
            code, message, fix = done.error
            _bad(UserError(code, message, fix=fix), config, tally)
        for packed in done.samples:
            writer.append(packed, file=done.file, place=done.place, origin=done.origin)
        if time.monotonic() - logged > SECONDS_BETWEEN_LINES:
            logged = time.monotonic()
            log.info(
                "tokenising %s: %.0f %%, %s records, %s tokens, %.0f s",
                config.path,
                100 * reader.share_read,
                f"{tally.num_records:,}",
                f"{writer.num_tokens:,}",
                logged - start,
            )


def _from_shards_or_encoded(
    tasks: Iterator[Task], encoder: Encoder, workers: int | None, shards: Shards
) -> Iterator[Encoded]:
    """Yield the result of each task, in order; new results are added to `shards`."""
    num_kept = 0
    for kept in shards.kept():
        # Read the task although it is done: reading counts records and finds bad ones.
        file, place, *_ = next(tasks)
        assert (file, place) == (kept.file, kept.place), f"{shards.directory=} {file=} {place=} {kept=}"
        num_kept += 1
        yield kept
    if num_kept:
        log.info("tokenising continues after %s records in %s", f"{num_kept:,}", shards.directory)
    for done in _encoded(tasks, encoder, workers):
        yield done
        shards.add(done)


def _tasks(reader: Reader, config: DataConfig, tally: Tally) -> Iterator[Task]:
    """Yield what is to be encoded; a record that does not have the shape of the source is a bad one."""
    shape = first = ""
    for row in reader.rows():
        tally.num_records += 1
        origin = f"{reader.names[row.file]}:{row.place}"
        try:
            if isinstance(row.value, UserError):
                raise row.value
            if not shape:
                shape, first = detect_shape(row.value, config.shape, origin=origin), origin
            check_same_shape(row.value, shape, origin=origin, first=first)
        except UserError as error:
            _bad(error, config, tally)
            continue
        tally.shapes[shape] += 1
        record = {name: value for name, value in row.value.items() if name in KEYS}
        yield row.file, row.place, origin, record, shape


def _bad(error: UserError, config: DataConfig, tally: Tally) -> None:
    if config.on_bad_record == "error":
        raise error
    tally.skip(error)


def _no_samples(config: DataConfig, tally: Tally) -> UserError:
    example = f"; the first of {tally.num_skipped} bad records: {tally.examples[0]}" if tally.examples else ""
    return UserError(
        "IDLM-0208",
        f"{config.path} has no samples{example}",
        fix=f"give records of one of the shapes: {', '.join(shape.example for shape in SHAPES.values())}",
    )


def default_workers() -> int:
    """Return the number of processes that tokenise without `data.workers`: one per core of this process."""
    return min(MAX_DEFAULT_WORKERS, len(os.sched_getaffinity(0)))


def _encoded(tasks: Iterator[Task], encoder: Encoder, workers: int | None) -> Iterator[Encoded]:
    """Yield the result of each task, in order."""
    num_workers = default_workers() if workers is None else workers
    alone = RECORDS_ALONE if workers is None else 0
    for task in tasks if num_workers <= 1 else itertools.islice(tasks, alone):
        yield encode(encoder, task)
    first = next(tasks, None)
    if first is not None:
        yield from _encoded_by_workers(itertools.chain([first], tasks), encoder, num_workers)


def _encoded_by_workers(tasks: Iterator[Task], encoder: Encoder, num_workers: int) -> Iterator[Encoded]:
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
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


_WORKER: list[Encoder] = []


def _start_worker(encoder: Encoder) -> None:
    _WORKER[:] = [encoder]


def _encode_batch(tasks: Sequence[Task]) -> list[Encoded]:
    return [encode(_WORKER[0], task) for task in tasks]


def encode(encoder: Encoder, task: Task) -> Encoded:
    """Return the packed samples of one record, or its UserError, which names the record."""
    file, place, origin, record, shape = task
    try:
        samples = tuple(pack(sample) for sample in samples_of(record, shape, encoder, origin=origin))
    except UserError as error:
        message = error.message if origin in error.message else f"{origin}: {error.message}"
        return Encoded(file=file, place=place, origin=origin, error=(error.code, message, error.fix))
    except (TypeError, UnicodeEncodeError) as error:
        # Half of a surrogate pair is valid in JSON and invalid as text.
        message = f"{origin} has text that the tokenizer refuses, such as half of a surrogate pair: {error}"
        return Encoded(file=file, place=place, origin=origin, error=("IDLM-0202", message, "write UTF-8"))
    return Encoded(file=file, place=place, origin=origin, samples=samples)
