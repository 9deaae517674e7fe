"""Caches of full diffusion on one GPU: a block pass against its floor, and answers against no cache.

    python -m benchmarks.canvas_cache [model=llada-8b] [canvas=8192] [answer=512] [block=32] [passes=10]
        [blocks=4] [caches=dual,prefix] [rounds=3] [graphs=true] [record=true]

One process measures the read-only stream, then runs the whole engine on random weights of the true shape with
one sequence, in CUDA graphs. The arm without a cache decides; the others replay its decisions.
The floor of a block pass is the time to stream all weights and the KV of the canvas.
`speedup_over_none` compares the passes of the first `blocks` blocks, refreshes included; its limit has block
passes at their floor. `agreement_with_none`: share of the decided tokens that the arm itself would have
proposed, which on random weights does not transfer to trained ones."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.engine.decoding.harness import PAGE_SIZE
from benchmarks.models import assembled, model_of, slot_bytes, weight_bytes
from benchmarks.shared import Report, chosen, defaults, parse_options, start
from benchmarks.stream import stream_rate
from idlm.contracts import SamplingParams
from idlm.devices import free_cached_memory
from idlm.infer.decoders.base import CanvasReuse
from idlm.infer.decoders.full import FullConfig, FullDecoder
from idlm.infer.decoders.full_rows import CACHES, active_canvases
from idlm.infer.engine import Engine
from idlm.infer.models.loader import LoadedModel
from idlm.infer.state.batch import StepPlan, WantedRows
from idlm.infer.state.sequence_state import SequenceState

DEFAULTS = defaults(
    "model=llada-8b device=cuda dtype=bfloat16 canvas=8192 answer=512 block=32 passes=10 "
    "blocks=4 caches=dual,prefix rounds=3 graphs=true record=true"
)
MODELS = {"llada-8b": "llada_8b", "dream-7b": "dream_7b", "tiny": "tiny_llada"}
"""Names of benchmarks/models.py by those of the option."""


def measure(arguments: list[str]) -> int:
    options = parse_options(arguments, DEFAULTS, needs_gpu="canvas_cache")
    caches, [name] = chosen(options, "caches", CACHES.names()), chosen(options, "model", MODELS)
    load, report, stream = (
        _load(options),
        Report("canvas_cache", options),
        stream_rate(device=options["device"]),
    )
    model = model_of({**options, "model": MODELS[name]})
    # The limit of a pass streams all weights and the KV of the canvas.
    floor = 1e3 * (weight_bytes(model) + load.canvas * slot_bytes(model)) / stream
    decisions, none = Decisions(load, model.device), None
    for cache in (None, *caches):
        engine = CanvasEngine(model, load, cache, decisions, graphs=options["graphs"] == "true")
        measured = CanvasMeasured(load=load, reuse=engine.engine.decoder.kv_policy.reuse)
        engine.run()
        for _ in range(int(options["rounds"])):
            engine.measure(measured)
        del engine
        free_cached_memory()
        none = none or measured
        case = {"model": name, "cache": cache or "none", "canvas": load.canvas, "block": load.block}
        _add(report, case, measured, none, floor)
    return 0


def _load(options: dict[str, str]) -> CanvasLoad:
    load = CanvasLoad(
        canvas=int(options["canvas"]),
        answer=int(options["answer"]),
        block=int(options["block"]),
        passes=int(options["passes"]),
        num_blocks=int(options["blocks"]),
    )
    has_blocks = load.answer % load.block == 0 and load.num_blocks * load.block <= load.answer < load.canvas
    assert has_blocks and 1 <= load.passes <= load.block, f"{load}: not so many whole blocks and passes"
    return load


def _add(
    report: Report, case: dict[str, object], measured: CanvasMeasured, none: CanvasMeasured, floor: float
) -> None:
    load = measured.load
    total, total_none = (median(sum(each) for each in one.rounds) for one in (measured, none))
    step_none = 1e3 * total_none / (load.num_blocks * load.passes)
    if measured is none:
        report.add(case, "step_ms", step_none, "ms")
        return
    block_passes, refreshes = _passes_of(measured)
    report.add(case, "step_ms", 1e3 * median(block_passes), "ms", floor=floor, exactness="lossy")
    report.add(case, "refresh_ms", 1e3 * median(refreshes), "ms", baseline=step_none, exactness="lossy")
    share = len(refreshes) / (len(refreshes) + len(block_passes))
    minimum = 1 / (share + (1 - share) * floor / step_none)
    report.add(case, "speedup_over_none", total_none / total, "x", floor=minimum, exactness="lossy")
    agreement = measured.num_equal / measured.num_replayed
    report.add(case, "agreement_with_none", agreement, "share", exactness="lossy")


def _passes_of(measured: CanvasMeasured) -> tuple[list[float], list[float]]:
    """Seconds of the passes between refreshes, and of refreshes, over all rounds. Passes of an engine with a
    cache are not launched in advance."""
    passes, reuse = measured.load.passes, measured.reuse
    assert reuse is not None
    block_passes, refreshes = list[float](), list[float]()
    for seconds in measured.rounds:
        assert len(seconds) == measured.load.num_blocks * passes, f"{len(seconds)=}"
        for number, each in enumerate(seconds):
            (refreshes if reuse.refreshes(number % passes) else block_passes).append(each)
    return block_passes, refreshes


@dataclass(frozen=True, slots=True, kw_only=True)
class CanvasLoad:
    """One sequence whose canvas has `canvas` positions, the last `answer` of them masks, decided in blocks of
    `block` positions and `passes` passes. A round decides the first `num_blocks` blocks."""

    canvas: int
    answer: int
    block: int
    passes: int
    num_blocks: int

    @property
    def num_prompt(self) -> int:
        return self.canvas - self.answer


class Decisions:
    """Positions `chosen_SW` (bool) and tokens `tokens_SW` of every pass; the last row is of no pass. A
    replaying arm counts in `num_equal` how many of the `num_replayed` tokens it would have proposed itself.
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
    own. `reuse`: None for the arm without a cache."""

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
        """Decide the blocks of a round; returns the seconds of every pass. Where passes are launched before
        their results, only the sum means something."""
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


if __name__ == "__main__":
    start(measure, __doc__)
