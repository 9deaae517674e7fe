"""The training set as the trainer sees it: item k, one packed row, is a pure function of (configuration, k).

Order, curriculum and resuming need no state: item k holds the samples that the packing plan puts into row k,
laid out for the stage of the curriculum that k belongs to."""

from __future__ import annotations

import os
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from idlm.errors import UserError
from idlm.log import rank
from idlm.masks import PADDING_DOC
from idlm.train.config.data import DataConfig
from idlm.train.data.base import Encoder, Source, open_source
from idlm.train.data.cache import CountedSource
from idlm.train.data.layout import IGNORE_LABEL, ROW_FIELDS, pack_rows
from idlm.train.data.packing import FileRows, LengthLimits, StreamRows
from idlm.train.distributed.collectives import gather_objects, while_others_wait
from idlm.train.objectives.base import Objective
from idlm.train.objectives.curriculum import Curriculum


class PackedDataset(Dataset[dict[str, Any]]):
    """`len` counts the items of the whole run.

    `left_out`, bool [num_samples], marks samples that are not used. `curriculum`, whose length in epochs may
    depend on how many rows the data packs into, is set before items are read."""

    curriculum: Curriculum

    def __init__(
        self,
        source: Source,
        objective: Objective,
        *,
        max_length: int,
        row_length: int,
        overlong: str,
        pad_token_id: int,
        seed: int,
        left_out: np.ndarray | None = None,
    ) -> None:
        self.source, self.objective, self.row_length = source, objective, row_length
        self.pad_token_id, self.seed, self.left_out = pad_token_id, seed, left_out
        limits = LengthLimits(
            objective=objective, max_length=max_length, row_length=row_length, overlong=overlong
        )
        self.rows: FileRows | StreamRows = StreamRows(source, limits)
        if source.num_samples is not None:
            self.rows = FileRows(source, limits, seed=seed, left_out=left_out)

    def __len__(self) -> int:
        return self.curriculum.num_items

    def __getitem__(self, item: int) -> dict[str, Any]:
        """ROW_FIELDS as arrays [T], with `item_id` and the `stage` the item belongs to."""
        stage = self.curriculum.stage_of_step(item // self.curriculum.global_batch)
        documents = [
            self.objective.rows(sample, stage, (self.seed, item, index))
            for index, sample in enumerate(self.rows.row(item))
        ]
        packed: dict[str, Any] = pack_rows(documents, self.row_length, pad_token_id=self.pad_token_id)
        return packed | {"item_id": item, "stage": stage.index}

    def rows_per_epoch(self) -> int | None:
        """Packed rows of an epoch; None for an endless source."""
        return len(self.rows) if isinstance(self.rows, FileRows) else None


def collate(items: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Stack packed rows of one stage to tensors [B, T].

    Adds indices into the flattened B*T rows, found here so that no device waits for them: `noisy_index` and
    `clean_index` (supervised rows of either half), `open_index` (supervised noisy rows that show their token,
    in neither of those), `gate_index` (all MASK rows, for an adapter), `clean_rows` (all clean rows). Adds
    `item_ids` [B], `fed` [6] (`count_fed`) and the scalar `num_tokens`, the document tokens of the
    micro-batch."""
    stages = {item["stage"] for item in items}
    assert len(stages) == 1, f"a micro-batch mixes {stages=}"
    arrays = {name: np.stack([item[name] for item in items]) for name in ROW_FIELDS}
    supervised = arrays["labels"] != IGNORE_LABEL
    is_open = supervised & arrays["is_noisy"] & (arrays["mask_rates"] == 0)
    arrays["noisy_index"] = np.flatnonzero(supervised & arrays["is_noisy"] & ~is_open)
    arrays["open_index"] = np.flatnonzero(is_open)
    arrays["clean_index"] = np.flatnonzero(supervised & ~arrays["is_noisy"])
    arrays["gate_index"] = np.flatnonzero(arrays["is_noisy"] & (arrays["mask_rates"] > 0))
    arrays["item_ids"] = np.asarray([item["item_id"] for item in items])
    is_real = arrays["doc_ids"] != PADDING_DOC
    arrays["clean_rows"] = np.flatnonzero(is_real & ~arrays["is_noisy"])
    # Documents of an objective without clean rows consist of noisy rows.
    arrays["num_tokens"] = np.asarray((is_real & ~arrays["is_noisy"]).sum() or is_real.sum())
    arrays["fed"] = count_fed(arrays)
    return Collated({name: torch.from_numpy(array) for name, array in arrays.items()})


def count_fed(rows: dict[str, np.ndarray]) -> np.ndarray:
    """`idlm.train.planning.flops.TokenCounts` as int64 [6], of collated rows [B, T] with their `noisy_index`
    and `clean_index`.

    A clean row that reaches position p sees p + 1 clean rows; a noisy one the clean rows before its block and
    the noisy ones of its block up to p: p + 1 again (`idlm.masks.dense_mask`)."""
    is_real, is_noisy = rows["doc_ids"] != PADDING_DOC, rows["is_noisy"]
    seen = rows["reach"] + 1
    clean, noisy = is_real & ~is_noisy, is_real & is_noisy
    counts = [clean.sum(), noisy.sum(), seen[clean].sum(), seen[noisy].sum()]
    return np.asarray([*counts, len(rows["clean_index"]), len(rows["noisy_index"])], dtype=np.int64)


class Collated(dict[str, Tensor]):
    """A batch that a data worker sends as one tensor: each tensor that is sent costs a connection with a
    handshake, about 3 ms, and 15 of them took as long as a step of a small model."""


def _sent(batch: Collated) -> tuple[Any, ...]:
    layout = [(name, tensor.shape, tensor.dtype) for name, tensor in batch.items()]
    return _received, (torch.cat([tensor.flatten().long() for tensor in batch.values()]), layout)


def _received(flat: Tensor, layout: list[tuple[str, torch.Size, torch.dtype]]) -> Collated:
    parts = flat.split([shape.numel() for _, shape, _ in layout])
    return Collated(
        {name: part.view(shape).to(dtype) for part, (name, shape, dtype) in zip(parts, layout, strict=True)}
    )


ForkingPickler.register(Collated, _sent)


def open_source_on_all_ranks(data: DataConfig, encoder: Encoder, *, output_dir: str) -> Source:
    """Return the same source on each rank; a UserError of one rank is raised on all. Collective.

    Rank 0 builds the cache first; then one rank of each node, which sees that cache on a shared file system
    and else builds its own; then the rest. Each rank plans rows from its own data: digests are compared."""
    is_first_of_node = int(os.environ.get("LOCAL_RANK", rank())) == 0
    sources: list[Source] = []

    def work() -> None:
        sources.append(open_source(data, encoder, output_dir=output_dir))

    for is_my_turn in (rank() == 0, is_first_of_node, True):
        while_others_wait(work if is_my_turn and not sources else None)
    (source,) = sources
    digests = gather_objects(source.digest() if isinstance(source, CountedSource) else "")
    if len(set(digests)) > 1:
        other = next(index for index, found in enumerate(digests) if found != digests[0])
        raise UserError(
            "IDLM-0233",
            f"ranks 0 and {other} have different data under {data.path}",
            fix="give every node the same files, tokenizer and template, or a data.cache_dir that they share",
        )
    return source
