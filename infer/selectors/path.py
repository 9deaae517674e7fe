"""The path selector: scores of the likeliest tokens of a mask row after the draft before it (DFlash 2).

`idlm.selector` states the score. Two launches select the candidates of all rows, one draws the drafts of each
sequence in order, and one stores what they were drawn from. B sequences, J drafts, M = B * J draft rows."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from torch import Tensor

from idlm.infer.models.base import ModelSpec
from idlm.infer.models.dense import DenseTrunk
from idlm.infer.selectors.base import SELECTORS, MaskRows, Selector
from idlm.infer.state.batch import Batch
from idlm.infer.state.sequence_state import SequenceState
from idlm.kernels.draft_walk import Walk, top_candidates, walk
from idlm.kernels.sampling import Drafts
from idlm.selector import NUM_CANDIDATES, PathWeights, check_path_weights, load_path_weights


@SELECTORS.register("path")
class PathSelector(Selector):
    name: ClassVar[str] = "path"

    @classmethod
    def check(cls, directory: Path, spec: ModelSpec) -> None:
        check_path_weights(directory, vocab_size=spec.vocab_size, width=spec.width)

    def __init__(self, weights: PathWeights, trunk: DenseTrunk) -> None:
        self._weights, self._linears = weights, trunk.linears
        # A power of two, also for the vocabularies of tests.
        self._num_candidates = 1 << (min(NUM_CANDIDATES, trunk.spec.vocab_size).bit_length() - 1)

    @classmethod
    def load(cls, directory: Path, trunk: DenseTrunk) -> PathSelector:
        weights = load_path_weights(directory, dtype=trunk.embed.dtype, device=trunk.embed.device)
        return cls(weights, trunk)

    def moved(self, trunk: DenseTrunk) -> PathSelector:
        return PathSelector(PathWeights(*(one.to(trunk.embed.device) for one in self._weights)), trunk)

    def draw(
        self, table: SequenceState, batch: Batch, rows: MaskRows, store: Drafts, drafts_ZJ: Tensor
    ) -> None:
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
