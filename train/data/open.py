"""Opens the source of a run of several ranks: which one builds the cache while the others wait.

Rank 0 builds first; then one rank of each node, which finds that cache on a shared file system and else
builds its own; then the rest. Each rank plans rows from its own data, so digests of the data are compared.
"""

from __future__ import annotations

import os

from idlm.errors import UserError
from idlm.log import rank
from idlm.train.config.data import DataConfig
from idlm.train.data.base import Encoder, Source, open_source
from idlm.train.data.mixture import CountedSource
from idlm.train.distributed.collectives import gather_objects, while_others_wait


def open_source_on_all_ranks(data: DataConfig, encoder: Encoder, *, output_dir: str) -> Source:
    """Return the same source on each rank; a UserError of one rank is raised on all. Collective."""
    is_first_of_node = int(os.environ.get("LOCAL_RANK", rank())) == 0
    sources: list[Source] = []

    def work() -> None:
        sources.append(open_source(data, encoder, output_dir=output_dir))

    for is_my_turn in (rank() == 0, is_first_of_node, True):
        while_others_wait(work if is_my_turn and not sources else None)
    (source,) = sources
    digests = gather_objects(source.digest() if isinstance(source, CountedSource) else "")
    if len(set(digests)) > 1:
        other = next(place for place, found in enumerate(digests) if found != digests[0])
        raise UserError(
            "IDLM-0233",
            f"ranks 0 and {other} have different data under {data.path}",
            fix="give every node the same files, tokenizer and template, or a data.cache_dir that they share",
        )
    return source
