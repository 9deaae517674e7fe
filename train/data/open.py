"""Opening the source of a run: where its cache lies, and which rank builds it while the others wait.

Every rank calls `open_source_on_all_ranks`. Rank 0 builds first; then one rank of every node, which finds
the cache where nodes share a file system and builds its own where they do not; then the rest. Plans are
made from the data by every rank for itself, so that different data would go unnoticed: digests are
compared.
"""

from __future__ import annotations

import dataclasses
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from idlm.checkpoint import read_json
from idlm.errors import UserError
from idlm.files.disk import replace_text
from idlm.log import rank
from idlm.train.data.base import SOURCES, Encoder, Source
from idlm.train.data.cache import CachedSource
from idlm.train.distributed.collectives import gather_objects, highest, is_distributed
from idlm.train.loop.liveness import note_progress, progress_count

if TYPE_CHECKING:
    from idlm.train.config.schema import TrainConfig

CACHE_FOLDER = "data_cache"
DATA_FILE = "data.json"
BASE_FILE = "base.json"
SECONDS_BETWEEN_SIGNS = 5.0


def open_source(config: TrainConfig, encoder: Encoder) -> Source:
    """The source of `config.data`, built by this process where it is not cached."""
    data = config.data
    beside = Path(config.output_dir).absolute().parent / CACHE_FOLDER
    data = dataclasses.replace(data, cache_dir=data.cache_dir or str(beside))
    return SOURCES.get(data.source)(data, encoder)


def open_source_on_all_ranks(config: TrainConfig, encoder: Encoder) -> Source:
    """The same source on every rank; a UserError of one rank is raised on all. Collective."""
    if not is_distributed():
        return open_source(config, encoder)
    is_first_of_node = int(os.environ.get("LOCAL_RANK", rank())) == 0
    sources: list[Source] = []
    for is_my_turn in (rank() == 0, is_first_of_node, True):
        is_needed = is_my_turn and not sources
        _while_others_wait((lambda: sources.append(open_source(config, encoder))) if is_needed else None)
    (source,) = sources
    digest = source.digest() if isinstance(source, CachedSource) else ""
    digests = gather_objects(digest)
    if len(set(digests)) > 1:
        other = next(place for place, found in enumerate(digests) if found != digests[0])
        raise UserError(
            "IDLM-0233",
            f"ranks 0 and {other} have different data under {config.data.path}",
            fix="give every node the same files, tokenizer and template, or a data.cache_dir that they share",
        )
    return source


def remember_data(run: Path, source: Source, *, is_continued: bool) -> None:
    """Write what a run trains on into its folder `run`; refuse to continue it on other data (IDLM-0235).

    Item k of a run is a pure function of its data, so that with other data a resumed run would see some
    samples twice and others never, in silence.
    """
    if not isinstance(source, CachedSource):
        return
    now = {"digest": source.digest(), "num_samples": source.num_samples}
    known = run / DATA_FILE
    if is_continued and known.is_file():
        before = read_json(known)
        if before != now:
            raise UserError(
                "IDLM-0235",
                f"the run in {run} was started on {before.get('num_samples')} samples that are not the "
                f"{now['num_samples']} of its data now",
                fix="restore the data files, or start a new run: another output_dir, or resume=never",
            )
        return
    replace_text(known, json.dumps(now))


def remember_base(run: Path, identity: str | None, *, is_continued: bool) -> None:
    """Write which base an adapter is trained on into `run`; refuse to continue it on another (IDLM-0518).

    A checkpoint of such a run holds the adapter alone; the frozen base is read again from model.path.
    """
    known = run / BASE_FILE
    if identity is None:
        return
    if is_continued and known.is_file():
        before = read_json(known).get("base_identity")
        if before != identity:
            raise UserError(
                "IDLM-0518",
                f"the weights in model.path are not those that the adapter in {run} was started on",
                fix="restore them, or start a new run: another output_dir, or resume=never",
            )
        return
    replace_text(known, json.dumps({"base_identity": identity}))


def _while_others_wait(work: Callable[[], None] | None) -> None:
    """Do `work` (None: wait for those who have some). Signs of life keep collective calls from timing out."""
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
        if work is None and heard > before:
            # The work of another rank is what this one waits for: as long as it goes on, this is no hang.
            note_progress()
    unexpected = [error for error in failures if not isinstance(error, UserError)]
    if unexpected:
        # The watchdog tells the other ranks, which wait below.
        raise unexpected[0]
    told = [(error.code, error.message, error.fix) for error in failures if isinstance(error, UserError)]
    for found in gather_objects(told):
        for code, message, fix in found:
            raise UserError(code, message, fix=fix)
