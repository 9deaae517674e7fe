"""Records the passes of an engine with FOCUS: masks, deltas, importance in layer 1, and decided places.

The engine must be eager and read the results of each pass before the next one (`EAGER`). Without eviction
(`NO_EVICTION`) the accelerator only measures, so that its answers are those of full blocks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from benchmarks.engine.unmasking.trace import BlockTrace, rounded
from idlm.infer.accelerators.focus import FocusPass
from idlm.infer.decoders.block import BlockDecoder
from idlm.infer.engine import Engine
from idlm.infer.state.batch import StepPlan, lane_of

EAGER: dict[str, Any] = {"graphs": "off", "num_inflight_steps": 0, "prefix_cache": False}
NO_EVICTION: dict[str, Any] = {"alpha": 1e9, "stability": "off"}


@dataclass(frozen=True, slots=True, kw_only=True)
class PassRecord:
    """One pass over one block: its masks, those of them that it decided, and by mask the importance delta and
    the importance in layer 1 alone.
    """

    masks: tuple[int, ...]
    decided: tuple[int, ...]
    deltas: tuple[float, ...]
    raw: tuple[float, ...]


class Recorder:
    """`blocks`: by number of the prompt and first position of the block, the passes of its last run."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._measured: tuple[list[list[float]], list[list[float]], list[list[bool]]] | None = None
        self.blocks: dict[tuple[int, int], list[PassRecord]] = {}

    def measured(self, focus: FocusPass, first_BPW: Tensor, second_BPW: Tensor) -> None:
        """Note what a pass has measured."""
        raw_BW = second_BPW.sum(dim=1)
        is_mask_BW = focus.view.is_mask_BW & focus.view.active.is_maskable_BW
        self._measured = ((raw_BW - first_BPW.sum(dim=1)).tolist(), raw_BW.tolist(), is_mask_BW.tolist())

    def decided(self, decoder: BlockDecoder, plan: StepPlan, num_emitted_B: Tensor) -> None:
        """Note what the pass has decided; blocks that were clean have been emitted."""
        if self._measured is None:
            return
        assert plan.active is not None
        requests = {lane_of(request): request for request in self._engine.scheduler.running}
        columns = (
            plan.lanes_B.tolist(),
            plan.active.starts_B.tolist(),
            plan.active.num_passes_B.tolist(),
            num_emitted_B.tolist(),
            decoder.blocks.is_decided_ZW[plan.lanes_B].tolist(),
            *self._measured,
        )
        self._measured = None
        for lane, start, number, emitted, is_decided, deltas, raw, is_mask in zip(*columns, strict=True):
            masks = [place for place, flag in enumerate(is_mask) if flag]
            if not masks:
                continue
            passes = self.blocks.setdefault((_prompt(requests[lane].request_id), start), [])
            if not number:
                passes.clear()
            passes.append(
                PassRecord(
                    masks=tuple(masks),
                    decided=tuple(place for place in masks if emitted or is_decided[place]),
                    deltas=tuple(deltas[place] for place in masks),
                    raw=tuple(raw[place] for place in masks),
                )
            )

    def traced(self, size: int, num_prompts: int) -> tuple[BlockTrace, ...]:
        """All blocks of the first prompts that ended clean, in order, with deltas as a file holds them."""
        return tuple(
            BlockTrace(
                prompt=prompt,
                start=start,
                num_fixed=size - len(passes[0].masks),
                decided=tuple(one.decided for one in passes),
                deltas=tuple(rounded(one.deltas) for one in passes),
            )
            for (prompt, start), passes in sorted(self.blocks.items())
            if prompt < num_prompts and passes[-1].decided == passes[-1].masks
        )


@contextlib.contextmanager
def recording(engine: Engine) -> Iterator[Recorder]:
    """Record the passes of an engine whose requests are numbered, as `evaluate` numbers them."""
    recorder, select, advance = Recorder(engine), FocusPass._select, BlockDecoder.advance

    def selecting(focus: FocusPass, first_BPW: Tensor, second_BPW: Tensor) -> Any:
        recorder.measured(focus, first_BPW, second_BPW)
        return select(focus, first_BPW, second_BPW)

    def advancing(decoder: BlockDecoder, table: Any, batch: Any, plan: StepPlan, wanted: Any) -> Any:
        outcome = advance(decoder, table, batch, plan, wanted)
        recorder.decided(decoder, plan, outcome.num_emitted_B)
        return outcome

    FocusPass._select = selecting  # type: ignore[method-assign, assignment]
    BlockDecoder.advance = advancing  # type: ignore[method-assign, assignment]
    try:
        yield recorder
    finally:
        FocusPass._select, BlockDecoder.advance = select, advance  # type: ignore[method-assign]


def _prompt(request_id: str) -> int:
    """The number that `evaluate` gave to a prompt, which a run prefixes with its own."""
    return int(request_id.rpartition(":")[2])
