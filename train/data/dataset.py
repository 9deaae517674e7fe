"""The training set as the trainer sees it: item k, one packed row, is a pure function of (configuration, k).

Order, curriculum and resuming need no state. Item k holds the samples that the packing plan put into row k,
laid out for the stage that k belongs to.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from idlm.masks import PADDING_DOC
from idlm.train.data.base import Source
from idlm.train.data.finite_source import FileRows, overlong_error, split
from idlm.train.data.layout import IGNORE_LABEL, ROW_FIELDS, Sample, pack_rows
from idlm.train.data.packing import StreamPlan
from idlm.train.objectives.base import Objective
from idlm.train.objectives.curriculum import Curriculum
from idlm.train.planning.time import count_fed

OVERLONG_POLICIES = ("error", "drop", "truncate", "split")
KEPT_POOLS = 4


class PackedDataset(Dataset[dict[str, Any]]):
    """`len` = items of the whole run; indexing is deterministic and stateless up to a cache. `left_out`, bool
    [num_samples], are samples of a file that are not used.
    """

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
        assert overlong in OVERLONG_POLICIES, f"{overlong=}"
        self.source, self.objective = source, objective
        self._curriculum: Curriculum | None = None
        self.max_length, self.row_length, self.overlong = max_length, row_length, overlong
        self.pad_token_id, self.seed = pad_token_id, seed
        self._pools: OrderedDict[int, list[list[int]]] = OrderedDict()
        self._samples: OrderedDict[int, Sample | None] = OrderedDict()
        self._stream = StreamPlan(cost_of=self._cost, capacity=row_length)
        self.file: FileRows | None = None
        if source.num_samples is not None:
            self.file = FileRows(
                source,
                objective,
                max_length=max_length,
                row_length=row_length,
                overlong=overlong,
                seed=seed,
                left_out=left_out,
            )

    @property
    def curriculum(self) -> Curriculum:
        assert self._curriculum is not None, "start() gives the curriculum"
        return self._curriculum

    def start(self, curriculum: Curriculum) -> None:
        """Set the curriculum, whose length in epochs may depend on how many rows the data packs into."""
        self._curriculum = curriculum

    def __len__(self) -> int:
        return self.curriculum.num_items

    def __getitem__(self, item: int) -> dict[str, Any]:
        """ROW_FIELDS as arrays [T], with `item_id` and the `stage` the item belongs to."""
        stage = self.curriculum.stage_of_item(item)
        samples = self.samples(item)
        documents = [
            self.objective.rows(sample, stage, (self.seed, item, place))
            for place, sample in enumerate(samples)
        ]
        packed: dict[str, Any] = pack_rows(documents, self.row_length, pad_token_id=self.pad_token_id)
        return packed | {"item_id": item, "stage": stage.index}

    def members(self, item: int) -> list[int]:
        """Sample indices of the packed row `item`; a sample that was split may be there several times."""
        if self.file is not None:
            return [int(self.file.samples[unit]) for unit in self.file.units(item)]
        pool, row = divmod(item, self._stream.rows_per_pool)
        return self._pool(pool)[row]

    def samples(self, item: int) -> list[Sample]:
        """What the packed row `item` holds, cut to `max_length`."""
        if self.file is not None:
            return [self.file.sample(unit) for unit in self.file.units(item)]
        return [sample for index in self.members(item) if (sample := self._usable(index)) is not None]

    @property
    def num_dropped(self) -> int:
        """Samples of a file left out because they are longer than `max_length`; 0 for endless sources."""
        return 0 if self.file is None else self.file.num_dropped

    def rows_per_epoch(self) -> int | None:
        """Packed rows of an epoch; None for an endless source."""
        return None if self.file is None else len(self.file)

    def _pool(self, pool: int) -> list[list[int]]:
        if pool not in self._pools:
            self._pools[pool] = self._stream.pool(pool)
            while len(self._pools) > KEPT_POOLS:
                self._pools.popitem(last=False)
        return self._pools[pool]

    def _usable(self, index: int) -> Sample | None:
        """The fitted sample of an endless source, kept for a while, because planning has just made it."""
        if index not in self._samples:
            self._samples[index] = self._fitted(self.source.sample(index))
            while len(self._samples) > KEPT_POOLS * 1024:
                self._samples.popitem(last=False)
        return self._samples[index]

    def _cost(self, index: int) -> int:
        sample = self._usable(index)
        return 0 if sample is None else self.objective.num_rows(sample)

    def _fitted(self, sample: Sample) -> Sample | None:
        """The sample within `max_length`, by the overlong policy; None when it is dropped."""
        if len(sample) <= self.max_length and self._fits_row(sample):
            return sample
        if self.overlong == "drop":
            return None
        if self.overlong == "truncate":
            start, stop = split(sample, self._fits_row, max_length=self.max_length)[0]
            cut = sample.piece(start, stop)
            return cut if cut.supervised[1:].any() else None
        raise overlong_error(sample, self.objective, max_length=self.max_length, row_length=self.row_length)

    def _fits_row(self, sample: Sample) -> bool:
        return self.objective.num_rows(sample) <= self.row_length


def collate(items: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Stack packed rows to [B, T] tensors.

    Adds `noisy_index` and `clean_index` (flat indices into B*T of the supervised rows of either half, found
    here so that no device ever waits for them), `open_index` (noisy rows whose target was left unmasked, and
    which are in neither), `gate_index` (those of all noisy rows, for a gated adapter),
    `item_ids` [B], `fed` [6] (`idlm.train.planning.time.count_fed`) and the scalar `num_tokens`, the document
    tokens of the micro-batch.
    """
    stages = {item["stage"] for item in items}
    assert len(stages) == 1, f"a micro-batch mixes {stages=}"
    arrays = {name: np.stack([item[name] for item in items]) for name in ROW_FIELDS}
    supervised = arrays["labels"] != IGNORE_LABEL
    is_open = supervised & arrays["is_noisy"] & (arrays["mask_rates"] == 0)
    arrays["noisy_index"] = np.flatnonzero(supervised & arrays["is_noisy"] & ~is_open)
    arrays["open_index"] = np.flatnonzero(is_open)
    arrays["clean_index"] = np.flatnonzero(supervised & ~arrays["is_noisy"])
    arrays["gate_index"] = np.flatnonzero(arrays["is_noisy"])
    arrays["item_ids"] = np.asarray([item["item_id"] for item in items])
    arrays["num_tokens"] = np.asarray(((arrays["doc_ids"] != PADDING_DOC) & ~arrays["is_noisy"]).sum())
    arrays["fed"] = count_fed(arrays)
    return {name: torch.from_numpy(array) for name, array in arrays.items()}
