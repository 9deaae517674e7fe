"""The selector of drafts: a small trained part that draws them one after the other, by scores of the likely
tokens of a mask row after the draft before it (DFlash 2); `idlm.selector` states the score.

Without one, drafts are independent draws from mask rows, none of which saw the drafts before it. Drafts stay
exact whatever it computes, as long as each is drawn from the very distribution that is stored with it, and
that distribution depends on nothing but the pass and the drafts before it. Two launches select the candidates
of all rows, one takes them out of the stored rows, one draws the drafts of each sequence in order, and one
stores what they were drawn from. B sequences of a pass, J drafts, M = B * J draft rows, X wanted rows, V
vocabulary, Z lanes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from idlm.infer.models.dense import DenseTrunk
from idlm.infer.state.batch import Batch, WantedRows
from idlm.infer.state.sequence_state import SequenceState
from idlm.kernels.draft_walk import Walk, top_candidates, walk
from idlm.kernels.sampling import Drafts
from idlm.selector import NUM_CANDIDATES, PathWeights, load_path_weights


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskRows:
    """The mask rows of a pass that the next drafts come from. `logits_XV`: those of all wanted rows, as the
    requests change them. `rows_BJ` int64: numbers of wanted rows; -1: no draft, or one that does
    not come from a mask. `anchors_B` int64: the token that each sequence emitted last and its first draft
    follows. `uniforms_BJ` fp64: numbers for the draws."""

    wanted: WantedRows
    logits_XV: Tensor
    rows_BJ: Tensor
    anchors_B: Tensor
    uniforms_BJ: Tensor


class PathSelector:
    """`trunk`: of the model, by whose linear layers it computes."""

    def __init__(self, weights: PathWeights, trunk: DenseTrunk) -> None:
        self._weights, self._linears = weights, trunk.linears
        # A power of two, also for the vocabularies of tests.
        self._num_candidates = 1 << (min(NUM_CANDIDATES, trunk.spec.vocab_size).bit_length() - 1)

    @classmethod
    def load(cls, directory: Path, trunk: DenseTrunk) -> PathSelector:
        """Load the weights to the trunk's device, in its dtype."""
        weights = load_path_weights(directory, dtype=trunk.embed.dtype, device=trunk.embed.device)
        return cls(weights, trunk)

    def moved(self, trunk: DenseTrunk) -> PathSelector:
        """The same on the device of another trunk."""
        return PathSelector(PathWeights(*(one.to(trunk.embed.device) for one in self._weights)), trunk)

    def draw(
        self, table: SequenceState, batch: Batch, rows: MaskRows, store: Drafts, drafts_ZJ: Tensor
    ) -> None:
        """Draw each draft of `rows`, whose plain distributions `store` holds, and store it and the
        distribution that it was drawn from in its lane. Does not wait for the device."""
        wanted, rows_M = rows.wanted, rows.rows_BJ.flatten()
        hidden_MD = wanted.hidden_RD[wanted.rows_X[rows_M.clamp(min=0)]]
        walk(
            Walk(
                previous_VW=self._weights.previous_VW,
                candidate_VW=self._weights.candidate_VW,
                projected_MW=self._linears.linear(hidden_MD, self._weights.hidden_WD),
                anchors_B=rows.anchors_B,
            ),
            top_candidates(rows.logits_XV, rows_M, self._num_candidates),
            store,
            (table.temperature_Z, table.top_k_Z, table.top_p_Z, table.min_p_Z),
            filters=batch.filters,
            rows_BJ=rows.rows_BJ,
            lanes_B=batch.lanes_B,
            uniforms_BJ=rows.uniforms_BJ,
            drafts_ZJ=drafts_ZJ,
        )
