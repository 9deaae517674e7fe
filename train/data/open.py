"""Opens the source of a run: where its cache is, and which rank builds it while the others wait.

Rank 0 builds first; then one rank of each node, which finds that cache on a shared file system and else
builds its own; then the rest. Each rank plans rows from its own data, so digests of the data are compared.
"""

from __future__ import annotations

import dataclasses
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from idlm.checkpoint import read_json
from idlm.errors import UserError
from idlm.files.disk import replace_text
from idlm.log import rank
from idlm.train.data.base import SOURCES, Encoder, Source
from idlm.train.data.cache import CachedSource
from idlm.train.distributed.collectives import gather_objects, highest, is_distributed
from idlm.train.loop.liveness import note_progress, progress_count

if TYPE_CHECKING:
    from idlm.train.config.data import DataConfig

CACHE_FOLDER = "data_cache"
DATA_FILE = "data.json"
BASE_FILE = "base.json"
SECONDS_BETWEEN_SIGNS = 5.0


def open_source(data: DataConfig, encoder: Encoder, *, output_dir: str) -> Source:
    """Return the source of `data`; this process tokenises it where it is not cached."""
    folder = data.cache_dir or str(Path(output_dir).absolute().parent / CACHE_FOLDER)
    return SOURCES.get(data.source)(dataclasses.replace(data, cache_dir=folder), encoder)


def open_source_on_all_ranks(data: DataConfig, encoder: Encoder, *, output_dir: str) -> Source:
    """Return the same source on each rank; a UserError of one rank is raised on all. Collective."""
    if not is_distributed():
        return open_source(data, encoder, output_dir=output_dir)
    is_first_of_node = int(os.environ.get("LOCAL_RANK", rank())) == 0
    sources: list[Source] = []

    def work() -> None:
        sources.append(open_source(data, encoder, output_dir=output_dir))

    for is_my_turn in (rank() == 0, is_first_of_node, True):
        _while_others_wait(work if is_my_turn and not sources else None)
    (source,) = sources
    digests = gather_objects(source.digest() if isinstance(source, CachedSource) else "")
    if len(set(digests)) > 1:
        other = next(place for place, found in enumerate(digests) if found != digests[0])
        raise UserError(
            "IDLM-0233",
            f"ranks 0 and {other} have different data under {data.path}",
            fix="give every node the same files, tokenizer and template, or a data.cache_dir that they share",
        )
    return source


def remember_data(run: Path, source: Source, *, is_continued: bool) -> None:
    """Store the identity of a run's data in its folder `run`; UserError IDLM-0235 where a resumed run has
    other data.

    Item k of a run is a pure function of its data: with other data, a resumed run would see some samples
    twice and others never.
    """
    if isinstance(source, CachedSource):
        now = {"digest": source.digest(), "num_samples": source.num_samples}
        before = _remembered(run / DATA_FILE, now, is_continued=is_continued)
        if before != now:
            raise UserError(
                "IDLM-0235",
                f"the run in {run} was started on {before.get('num_samples')} samples that are not the "
                f"{now['num_samples']} of its data now",
                fix="restore the data files, or start a new run: another output_dir, or resume=never",
            )


def remember_base(run: Path, identity: str | None, *, is_continued: bool) -> None:
    """Store which base an adapter is trained on in `run`; UserError IDLM-0518 where a resumed run has
    another.

    A checkpoint of such a run holds the adapter only; the frozen base is read again from model.path.
    """
    now = {"base_identity": identity}
    if identity is not None and _remembered(run / BASE_FILE, now, is_continued=is_continued) != now:
        raise UserError(
            "IDLM-0518",
            f"the weights in model.path are not those that the adapter in {run} was started on",
            fix="restore them, or start a new run: another output_dir, or resume=never",
        )


def _remembered(path: Path, now: dict[str, Any], *, is_continued: bool) -> dict[str, Any]:
    """Return what the run was started with according to `path`; a new run writes `now` there."""
    if is_continued and path.is_file():
        return read_json(path)
    replace_text(path, json.dumps(now))
    return now


def _while_others_wait(work: Callable[[], None] | None) -> None:
    """Do `work` (None: wait for ranks that have some), in step with all ranks.

    Collective calls at short intervals keep the process group from timing out. UserErrors are raised on all
    ranks.
    """
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
    unexpected = [error for error in failures if not isinstance(error, UserError)]
    if unexpected:
        # The other ranks wait below; the watchdog ends them.
        raise unexpected[0]
    reported = [(error.code, error.message, error.fix) for error in failures if isinstance(error, UserError)]
    for found in gather_objects(reported):
        for code, message, fix in found:
            raise UserError(code, message, fix=fix)
