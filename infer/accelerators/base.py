"""The contract of accelerators, which thin one side of the score matrix of blocks that are being decided.

kv side (mage, quest, sparsed): per KV head, the rows of a sequence's block see a list of the slots before it
in place of all. Rows side (focus): some of the block's rows are not computed, or not to the end. At most one
a side, and neither knows the other. A pass asks in this order: `begin` of both; `initial_rows`; in each
layer, as soon as keys and values of its rows are stored, `commit_kv`, `select_rows` and `select_kv`;
`finish`. Prompts and clean blocks are always computed exactly, and a row sees its own block. Lanes' state is
of one block (`BlockMemory`) and forgotten when a lane is seated or rewound: its block then begins anew.
B sequences, R rows, W places of a block, N query heads, K KV heads, H head dim, C listed slots, Z lanes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from idlm.infer.sparse.view import PassView
from idlm.infer.state.device import fill_lanes
from idlm.registry import Registry

Side = Literal["kv", "rows"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """The engine that an accelerator is to go with. `block_size` None: its decoder has no blocks. Heads are
    those of one rank, `graphs` is what the user asked for, `decoder_options` the decoder's whole Config.
    """

    decoder: str
    decoder_options: Mapping[str, Any]
    block_size: int | None
    is_shifted: bool
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    kv_dtype: torch.dtype
    num_lanes: int
    max_slots: int
    page_size: int
    device: torch.device
    tensor_parallel: int
    deterministic: bool
    graphs: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSelection:
    """Rows to go on with, of those still computed: `keep_R` (bool). `limits_R` int64: these rows then see
    their own block below these slots only (what lies behind has no keys and values yet); None: all of it.
    Rows of prompts, of clean blocks, and of sequences that need all their rows are kept as they are.

    `capacity` (at least two blocks; None: all rows): a number, chosen before the pass, of rows that there is
    room for beside what the host scheduled to be stored. Sequences take room in order, first those that
    waited longest. A sequence whose rows find no room waits: it drops out of the denoising part of this pass,
    decides nothing, and its random stream and its answer stay those it would have had. Its pass must leave no
    trace in an accelerator's state: `finish` skips `PassView.waits_B`.
    """

    keep_R: Tensor
    limits_R: Tensor | None = None
    capacity: int | None = None


class KVPass:
    """One pass of a kv-side accelerator. `is_sparse_B` (bool): whose block rows see lists of slots, where
    `select_kv` gives any. `needs_all_rows_B` (bool): of whom no row may be dropped in this pass.
    """

    def __init__(
        self, view: PassView, *, is_sparse_B: Tensor, needs_all_rows_B: Tensor | None = None
    ) -> None:
        self.view, self.is_sparse_B, self.needs_all_rows_B = view, is_sparse_B, needs_all_rows_B

    def commit_kv(self, layer: int) -> None:
        """The keys of prompts and clean blocks that this pass feeds are stored, for good."""

    def select_kv(self, layer: int, q_RNH: Tensor) -> Tensor | None:
        """Logical slots [B, K, C] before the block in any order, -1 in places that are not needed; None:
        exact, for all. C does not depend on what tensors hold.

        `q_RNH`: the rows that are still computed, rotated. Only `is_sparse_B` is looked at.
        """
        return None

    def finish(self) -> None:
        """All layers are through."""


class RowsPass:
    """One pass of a rows-side accelerator. `view.rows_BW` says which rows are still fed, also at `finish`."""

    def __init__(self, view: PassView) -> None:
        self.view = view

    def initial_rows(self) -> RowSelection | None:
        """Of the rows that the decoder lays out, those that are computed at all; None: all. Those left out
        are seen with the keys and values that the last pass over them has stored.
        """
        return None

    def select_rows(self, layer: int, q_RNH: Tensor) -> RowSelection | None:
        """The rows that go on from here, this layer's attention included; None: all. Keys and values of the
        layer are stored, and `q_RNH` rotated, for all rows that are still fed.
        """
        return None

    def finish(self) -> None:
        """All layers are through."""


class Accelerator:
    """Base of all: one file each, registered in `ACCELERATORS` under its name. `Config` is a frozen dataclass
    of its options, filled from `accelerator.NAME.*`. Subclass `KVAccelerator` or `RowsAccelerator`.
    """

    name: ClassVar[str]
    Config: ClassVar[type]
    side: ClassVar[Side]
    exactness: ClassVar[Literal["exact", "lossy"]] = "lossy"
    exact_options: ClassVar[Mapping[str, Any]] = {}
    """Options with which it thins nothing, which contract tests hold it to."""
    is_static: ClassVar[bool] = False
    """Whether its own code has static shapes and never waits for the device, so that a CUDA graph can hold
    its passes: no nonzero, no index by booleans, no number read back. The passes themselves are static.
    """
    needs_blocks: ClassVar[bool] = True
    shards: ClassVar[bool] = False
    """Whether each rank of several can look at its own heads alone."""

    def __init__(self, config: Any, place: EngineSpec) -> None:
        self.config, self.place = config, place

    def problems(self) -> list[str]:
        """Every reason why it does not go with its place or with its own options, before anything is
        allocated.
        """
        place, found = self.place, []
        if self.needs_blocks and place.block_size is None:
            found.append(f"decoder={place.decoder} has no blocks (allowed: block)")
        if not self.is_static and place.graphs == "on":
            found.append(
                "graphs=on captures passes of static shape, and its passes are not (allowed: auto, off)"
            )
        if self.exactness != "exact" and place.deterministic:
            found.append(
                "deterministic=true, but its sums depend on the batch in their last bits (allowed: false)"
            )
        if not self.shards and place.tensor_parallel > 1:
            found.append(f"tensor_parallel={place.tensor_parallel} divides the heads it adds up (allowed: 1)")
        return found

    def page_bytes(self) -> int:
        """Bytes that it keeps for every KV page beside keys and values."""
        return 0

    def allocate(self) -> None:
        """Make the state of `place.num_lanes` lanes, on `place.device`."""

    def allocate_pages(self, num_pages: int) -> None:
        """Make the state of all KV pages, `page_bytes` each."""

    def reset(self, lanes: list[int]) -> None:
        """Forget the blocks of lanes on which new sequences sit down, or whose sequences lost their KV."""

    def copy_pages(self, copies: Sequence[tuple[int, int]]) -> None:
        """The KV of pages was copied (from, to), in this order."""


class KVAccelerator(Accelerator, ABC):
    """Thins what rows see."""

    side: ClassVar[Side] = "kv"

    @abstractmethod
    def begin(self, view: PassView) -> KVPass | None:
        """Before the first layer; None: this pass is exact and there is nothing to learn from it."""


class RowsAccelerator(Accelerator, ABC):
    """Thins the rows that are computed."""

    side: ClassVar[Side] = "rows"

    @abstractmethod
    def begin(self, view: PassView) -> RowsPass | None:
        """Before the first layer; None: all rows are computed and there is nothing to learn from them."""


class BlockMemory:
    """Of which block the state of each lane is: the one that begins at slot `starts_Z`; -1: of none. State of
    another block than the one in work counts for nothing, so it ends with its block.
    """

    def __init__(self, num_lanes: int, device: torch.device) -> None:
        self.starts_Z = torch.full((num_lanes,), -1, dtype=torch.int64, device=device)

    def knows(self, view: PassView) -> Tensor:
        """Whose state is of the block in work, bool [B]."""
        return self.starts_Z[view.plan.lanes_B] == view.active.starts_B

    def claim(self, view: PassView, who_B: Tensor) -> None:
        """The state of these (bool) is of the block in work from now on."""
        lanes_B = view.plan.lanes_B
        self.starts_Z[lanes_B] = torch.where(who_B, view.active.starts_B, self.starts_Z[lanes_B])

    def reset(self, lanes: list[int]) -> None:
        """Forget."""
        fill_lanes(lanes, -1, self.starts_Z)


ACCELERATORS: Registry[type[Accelerator]] = Registry("accelerator", "idlm.infer.accelerators")
