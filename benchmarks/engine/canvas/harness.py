"""An engine that decodes one canvas, and the decisions of one run replayed in another.

The decisions (which places a pass decides, and which tokens) of the arm without a cache replace those of the
other arms on the device, after their own have been computed: every arm sees the same canvas in every pass,
and the own decisions say how often the arms agree. Recording and replaying cost a few launches a pass,
which count against us. Shapes: B sequences, W positions of a block, X wanted rows, S recorded passes.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from benchmarks.engine.decoding.harness import PAGE_SIZE
from benchmarks.models import assembled
from idlm.contracts import SamplingParams
from idlm.infer.decoders.full import FullConfig, FullDecoder
from idlm.infer.decoders.full_rows import active_canvases
from idlm.infer.engine import Engine
from idlm.infer.models.loader import LoadedModel
from idlm.infer.state.batch import StepPlan, WantedRows
from idlm.infer.state.kv_cache import CanvasReuse
from idlm.infer.state.sequence_state import SequenceState


@dataclass(frozen=True, slots=True, kw_only=True)
class CanvasLoad:
    """One sequence whose canvas has `canvas` places, the last `answer` of them masks, decided in blocks of
    `block` places and `passes` passes. A round decides the first `num_blocks` blocks.
    """

    canvas: int
    answer: int
    block: int
    passes: int
    num_blocks: int

    @property
    def num_prompt(self) -> int:
        return self.canvas - self.answer


class Decisions:
    """Places `chosen_SW` (bool) and tokens `tokens_SW` of every pass; the last row is of no pass. A replaying
    arm counts in `num_equal` how many of the `num_replayed` tokens it would have proposed itself.
    """

    def __init__(self, load: CanvasLoad, device: torch.device) -> None:
        num_rows = load.num_blocks * load.passes + 1
        self._load = load
        self.chosen_SW = torch.zeros(num_rows, load.block, dtype=torch.bool, device=device)
        self.tokens_SW = torch.zeros(num_rows, load.block, dtype=torch.int64, device=device)
        self.num_equal = torch.zeros((), dtype=torch.int64, device=device)
        self.num_replayed = torch.zeros_like(self.num_equal)

    def watch(self, decoder: FullDecoder, *, replays: bool) -> None:
        propose, choose = decoder._propose, decoder._choose

        def proposed(
            table: SequenceState, batch: Any, plan: StepPlan, wanted: WantedRows, uniforms_BW: Tensor
        ) -> tuple[Tensor, ...]:
            ids_X, *others = propose(table, batch, plan, wanted, uniforms_BW)
            active = active_canvases(plan)
            index = (self._rows(decoder, table, plan)[active.sequence_X], active.index_X)
            if not replays:
                self.tokens_SW[index] = ids_X
                return ids_X, *others
            is_open_X = active.is_maskable_BW[active.sequence_X, active.index_X]
            recorded_X, counts_X = self.tokens_SW[index], self.chosen_SW[index] & is_open_X
            self.num_equal += (counts_X & (recorded_X == ids_X)).sum()
            self.num_replayed += counts_X.sum()
            return recorded_X, *others

        def chosen(table: SequenceState, plan: StepPlan, scores_BW: Tensor, numbers_BW: Tensor) -> Tensor:
            rows_B = self._rows(decoder, table, plan)
            if replays:
                return self.chosen_SW[rows_B, : scores_BW.shape[1]] & active_canvases(plan).is_maskable_BW
            chosen_BW = choose(table, plan, scores_BW, numbers_BW)
            self.chosen_SW[rows_B, : chosen_BW.shape[1]] = chosen_BW
            return chosen_BW

        decoder._propose, decoder._choose = proposed, chosen  # type: ignore[method-assign, assignment]

    def _rows(self, decoder: FullDecoder, table: SequenceState, plan: StepPlan) -> Tensor:
        """The row of each sequence's pass [B]; the last one for what is not recorded."""
        load, last = self._load, len(self.chosen_SW) - 1
        block_B = (table.num_known_Z[plan.lanes_B] - load.num_prompt) // load.block
        row_B = block_B * load.passes + decoder.num_passes_Z[plan.lanes_B]
        return torch.where(plan.samples_B & (row_B < last), row_B, last)


@dataclass(slots=True, kw_only=True)
class CanvasMeasured:
    """Seconds of every pass of every round, in order; `num_equal` of `num_replayed` tokens were the arm's
    own. `reuse`: None for the arm without a cache.
    """

    load: CanvasLoad
    reuse: CanvasReuse | None = None
    rounds: list[list[float]] = field(default_factory=list)
    num_equal: int = 0
    num_replayed: int = 0


class CanvasEngine:
    """An engine of one lane. `cache`: that of decoder `full`; None records decisions, others replay them."""

    def __init__(
        self, model: LoadedModel, load: CanvasLoad, cache: str | None, decisions: Decisions, *, graphs: bool
    ) -> None:
        self.load, self._decisions, self._num_rounds = load, decisions, 0
        steps = load.passes * (load.answer // load.block)
        config = FullConfig(order="low_confidence", block_length=load.block, steps=steps, cache=cache)
        decoder = FullDecoder(config, model.semantics)
        parts = assembled(
            model,
            decoder,
            max_num_seqs=1,
            max_length=load.canvas,
            max_num_batched_tokens=load.canvas,
            page_size=PAGE_SIZE,
            num_pages=-(-load.canvas // PAGE_SIZE),
            graphs="on" if graphs else "off",
            attention="triton" if graphs and model.device.type == "cuda" else "auto",
        )
        self.engine = Engine(parts)
        decisions.watch(decoder, replays=cache is not None)
        rng = torch.Generator().manual_seed(0)
        self._prompt = torch.randint(0, model.spec.vocab_size - 1, (load.num_prompt,), generator=rng)
        # An id from the mask's on moves up by one, so that no token of the prompt is the mask.
        self._prompt += self._prompt >= (model.semantics.mask_token_id or 0)

    def measure(self, into: CanvasMeasured) -> None:
        self._decisions.num_equal.zero_()
        self._decisions.num_replayed.zero_()
        into.rounds.append(self.run())
        into.num_equal += int(self._decisions.num_equal)
        into.num_replayed += int(self._decisions.num_replayed)

    def run(self) -> list[float]:
        """Decide the blocks of a round; returns the seconds of every pass. Where passes are launched ahead of
        their results, only the sum means something.
        """
        engine, load = self.engine, self.load
        params = SamplingParams(temperature=0, max_tokens=load.answer, ignore_eos=True, seed=0)
        engine.add_request(str(self._num_rounds), self._prompt.tolist(), params)
        num_wanted, num_tokens, seconds = load.num_blocks * load.block, 0, list[float]()
        while num_tokens < num_wanted:
            start = time.perf_counter()
            num_tokens += sum(len(event.token_ids) for event in engine.step())
            seconds.append(time.perf_counter() - start)
        engine.abort(str(self._num_rounds))
        engine._collect(max_inflight=0)
        engine.take_events()
        self._num_rounds += 1
        return seconds
