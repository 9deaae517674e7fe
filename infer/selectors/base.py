"""The contract of a selector: a small trained part that draws drafts one after the other.

Without one, drafts are independent draws from mask rows, none of which saw the drafts before it. A new kind
is one file in this folder that registers a subclass of `Selector`. Drafts stay exact whatever it computes, as
long as each is drawn from the very distribution that is stored with it, and that distribution depends on
nothing but the pass and the drafts before it. B sequences of a pass, J drafts, X wanted rows, V vocabulary, Z
lanes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from torch import Tensor

from idlm.infer.models.base import ModelSpec
from idlm.infer.models.dense import DenseTrunk
from idlm.infer.state.batch import Batch, WantedRows
from idlm.infer.state.sequence_state import SequenceState
from idlm.kernels.sampling import Drafts
from idlm.registry import Registry


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskRows:
    """The mask rows of a pass that the next drafts come from. `logits_XV`: those of all wanted rows, as the
    requests change them. `rows_BJ` int64: numbers of wanted rows; -1: no
    draft, or one that does not come from a mask. `anchors_B` int64: the token that each sequence emitted last
    and its first draft follows. `uniforms_BJ` fp64: numbers for the draws."""

    wanted: WantedRows
    logits_XV: Tensor
    rows_BJ: Tensor
    anchors_B: Tensor
    uniforms_BJ: Tensor


class Selector(ABC):
    """One kind, whose name a checkpoint's `idlm_config.json` gives."""

    name: ClassVar[str]

    @classmethod
    @abstractmethod
    def check(cls, directory: Path, spec: ModelSpec) -> None:
        """Raise UserError IDLM-0621 if the files in `directory` do not fit the model, without reading
        weights."""

    @classmethod
    @abstractmethod
    def load(cls, directory: Path, trunk: DenseTrunk) -> Selector:
        """Load the weights to the trunk's device, in its dtype."""

    @abstractmethod
    def moved(self, trunk: DenseTrunk) -> Selector:
        """The same on the device of another trunk, by whose linear layers it computes."""

    @abstractmethod
    def draw(
        self, table: SequenceState, batch: Batch, rows: MaskRows, store: Drafts, drafts_ZJ: Tensor
    ) -> None:
        """Draw each draft of `rows` and store it, and the distribution that it was drawn from, in its lane.
        Must not wait for the device on a GPU."""


SELECTORS: Registry[type[Selector]] = Registry("selector", "idlm.infer.selectors")
