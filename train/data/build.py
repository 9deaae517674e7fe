"""From records to a cache: every record is checked and tokenised once, before training, in one or several
processes.

A bad record stops the run by name, or is skipped and counted (`data.on_bad_record`). What is written does
not depend on the number of processes, nor on how often the build was stopped: finished shards are kept.
"""

from __future__ import annotations

import itertools
import logging
import multiprocessing
import os
import shutil
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from idlm.checkpoint import publish
from idlm.errors import UserError
from idlm.files.disk import DISK_CODE
from idlm.train.data.base import Encoder
from idlm.train.data.cache import CachedSource, CacheWriter, cache_key, open_cache, pack
from idlm.train.data.files import Reader, Row, reading
from idlm.train.data.settings import MAX_DEFAULT_WORKERS
from idlm.train.data.shapes import KEYS, SHAPES, check_same_shape, detect_shape, samples_of
from idlm.train.data.shards import Encoded, Shards
from idlm.train.loop.liveness import note_progress

if TYPE_CHECKING:
    from idlm.train.data.settings import DataConfig

log = logging.getLogger(__name__)
ON_BAD_RECORD = ("error", "skip")
DEFAULT_CACHE = "outputs/data_cache"
BATCH_RECORDS = 64
RECORDS_ALONE = 2048
"""Without `data.workers` so many records are encoded here first: for fewer, processes start too slowly."""
SECONDS_BETWEEN_LINES = 10.0
NUM_EXAMPLES = 5
MAX_DEPTH = 100

Task = tuple[int, int, str, dict[str, Any], str]
"""File, place, origin, record and shape of one record that is to be encoded."""


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


def cached_source(reader: Reader, config: DataConfig, encoder: Encoder) -> CachedSource:
    """The samples of `reader` from the cache, which is built where it is missing or damaged.

    The key covers the files' content identity, tokenizer, template and every setting that changes a
    sample; the mask token is not part of it and is looked up here.
    """
    settings = [config.source, config.shape, config.on_bad_record, encoder.use_chat_template]
    key = cache_key([reader.identity(), encoder.fingerprint(), *settings])
    directory = Path(config.cache_dir or DEFAULT_CACHE).expanduser() / key[:32]
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
    """Encode all records and publish the cache; raises the first bad record's UserError, or skips it.

    Shards that an earlier build of the same cache has finished are not encoded again.
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
            # Corrected data has another key, and nothing would ever remove these.
            shards.remove()
        raise
    shards.remove()
    if tally.num_skipped:
        log.warning("%d of %d records are bad and were skipped", tally.num_skipped, tally.num_records)


def _write_samples(
    writer: CacheWriter, reader: Reader, config: DataConfig, encoder: Encoder, tally: Tally, shards: Shards
) -> None:
    """All samples of all records in order, from shards or from the encoder."""
    start = said = time.monotonic()
    for done in _from_shards_or_encoded(_tasks(reader, config, tally), encoder, config.workers, shards):
        note_progress()
        if done.error is not None:
            code, message, fix = done.error
            _bad(UserError(code, message, fix=fix), config, tally)
        for packed in done.samples:
            writer.append(packed, file=done.file, place=done.place, origin=done.origin)
        if time.monotonic() - said > SECONDS_BETWEEN_LINES:
            said = time.monotonic()
            log.info(
                "tokenising %s: %.0f %%, %s records, %s tokens, %.0f s",
                config.path,
                100 * reader.share_read,
                f"{tally.num_records:,}",
                f"{writer.num_tokens:,}",
                said - start,
            )


def _from_shards_or_encoded(
    tasks: Iterator[Task], encoder: Encoder, workers: int | None, shards: Shards
) -> Iterator[Encoded]:
    """Every task's result, in order; new results are added to `shards`."""
    num_kept = 0
    for kept in shards.kept():
        # The task is read although it is done: reading counts records and finds bad ones.
        file, place, *_ = next(tasks)
        assert (file, place) == (kept.file, kept.place), f"{shards.directory=} {file=} {place=} {kept=}"
        num_kept += 1
        yield kept
    if num_kept:
        log.info("tokenising goes on after %s records in %s", f"{num_kept:,}", shards.directory)
    for done in _encoded(tasks, encoder, workers):
        yield done
        shards.add(done)


def _tasks(reader: Reader, config: DataConfig, tally: Tally) -> Iterator[Task]:
    """What is to be encoded; records that are no records of the source's shape are bad ones."""
    shape = first = ""
    for row in reader.rows():
        tally.num_records += 1
        origin = f"{reader.names[row.file]}:{row.place}"
        try:
            record = _record_of(row)
            if not shape:
                shape, first = detect_shape(record, config.shape, origin=origin), origin
            check_same_shape(record, shape, origin=origin, first=first)
            record = {name: value for name, value in record.items() if name in KEYS}
            _refuse_depth(record, origin)
        except UserError as error:
            _bad(error, config, tally)
            continue
        tally.shapes[shape] += 1
        yield row.file, row.place, origin, record, shape


def _refuse_depth(record: dict[str, Any], origin: str) -> None:
    """What is deeper than any text of a record cannot be sent to a worker."""
    level: list[Any] = [record]
    for _ in range(MAX_DEPTH):
        level = [
            value
            for item in level
            for value in (item.values() if isinstance(item, dict) else item)
            if isinstance(value, (dict, list))
        ]
        if not level:
            return
    raise UserError("IDLM-0202", f"{origin} is nested deeper than {MAX_DEPTH} levels", fix="flatten it")


def _record_of(row: Row) -> dict[str, Any]:
    if isinstance(row.value, UserError):
        raise row.value
    return row.value


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
    """Processes that tokenise where `data.workers` does not say: one per core that this process may use."""
    return min(MAX_DEFAULT_WORKERS, len(os.sched_getaffinity(0)))


def _encoded(tasks: Iterator[Task], encoder: Encoder, workers: int | None) -> Iterator[Encoded]:
    """Every task's result, in order."""
    num_workers = default_workers() if workers is None else workers
    alone = RECORDS_ALONE if workers is None else 0
    for task in tasks if num_workers <= 1 else itertools.islice(tasks, alone):
        yield encode(encoder, task)
    first = next(tasks, None)
    if first is not None:
        yield from _encoded_by_workers(itertools.chain([first], tasks), encoder, num_workers)


def _encoded_by_workers(tasks: Iterable[Task], encoder: Encoder, num_workers: int) -> Iterator[Encoded]:
    # A fork would copy this process with its threads and its GPU context. The fork server is a fresh process,
    # which imports what every worker needs once for all of them.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, type(encoder.tokenizer).__module__])
    with ProcessPoolExecutor(
        num_workers, mp_context=context, initializer=_start_worker, initargs=(encoder,)
    ) as pool:
        waiting: deque[Future[list[Encoded]]] = deque()
        try:
            for batch in _batched(tasks, BATCH_RECORDS):
                waiting.append(pool.submit(_encode_batch, batch))
                if len(waiting) >= 4 * num_workers:
                    yield from waiting.popleft().result()
            while waiting:
                yield from waiting.popleft().result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _batched(tasks: Iterable[Task], size: int) -> Iterator[Sequence[Task]]:
    remaining = iter(tasks)
    while batch := list(itertools.islice(remaining, size)):
        yield batch


_WORKER: list[Encoder] = []


def _start_worker(encoder: Encoder) -> None:
    _WORKER[:] = [encoder]


def _encode_batch(tasks: Sequence[Task]) -> list[Encoded]:
    return [encode(_WORKER[0], task) for task in tasks]


def encode(encoder: Encoder, task: Task) -> Encoded:
    """The packed samples of one record; its UserError, named after the record, is returned and not raised."""
    file, place, origin, record, shape = task
    try:
        samples = tuple(pack(sample) for sample in samples_of(record, shape, encoder, origin=origin))
    except UserError as error:
        message = error.message if origin in error.message else f"{origin}: {error.message}"
        return Encoded(file=file, place=place, origin=origin, error=(error.code, message, error.fix))
    except (TypeError, UnicodeEncodeError):
        if not _has_surrogate(record):
            raise
        message = f"{origin} has half of a surrogate pair, which is no text"
        return Encoded(file=file, place=place, origin=origin, error=("IDLM-0202", message, "write UTF-8"))
    return Encoded(file=file, place=place, origin=origin, samples=samples)


def _has_surrogate(value: Any) -> bool:
    if isinstance(value, dict):
        return any(_has_surrogate(item) for item in value.values())
    if isinstance(value, list):
        return any(_has_surrogate(item) for item in value)
    return isinstance(value, str) and any("\ud800" <= letter <= "\udfff" for letter in value)
