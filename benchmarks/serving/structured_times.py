"""Where the time of passes with grammars goes, on the host and on a GPU (`structured_load.py`)."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from idlm.infer.runtime.model_runner import Step
from idlm.infer.state.batch import Batch
from idlm.infer.structured import masks
from idlm.infer.structured.masks import PassGrammars


@contextlib.contextmanager
def pass_times() -> Iterator[dict[str, float]]:
    """Means (ms) over the passes with grammars, filled in at the end.

    Host: it waits for what a pass tells (`wait_ms`), then the device for the choice of drafts (`choice_ms`).
    While the forward pass runs, the host launches what follows hidden states (`decide_ms`), which includes
    the computation of bits (`bits_ms`). Device, on a GPU: from what a pass tells to the start of the next
    forward pass (`choice_wait_ms`), and from logits to the bits that mask them (`bits_wait_ms`).
    """
    clock, found = _Clock(), dict[str, float]()
    choose, bits, masked, tell = (
        getattr(PassGrammars, name) for name in ("choose_drafts", "bits", "masked", "tell")
    )
    choose_in_place, decide, beside = Step.choose_drafts, Step.decide, masks._beside

    def choose_after_waiting(self: PassGrammars, num_drafts: int) -> Any:
        clock.num_passes += 1
        told = [each.told[0] for each in self._followers.values() if each.told is not None]
        clock.host("wait_ms", lambda: [one._array for one in told])
        return clock.host("choice_ms", choose, self, num_drafts)

    def masked_later(self: PassGrammars, logits_XV: Tensor, *values: Any, **named: Any) -> Tensor:
        clock.begin("bits_wait_ms", logits_XV.device)
        found: Tensor = masked(self, logits_XV, *values, **named)
        return found

    def beside_then(values: Tensor, device: torch.device) -> Tensor:
        copied = beside(values, device)
        clock.end("bits_wait_ms", device)
        return copied

    def tell_then(self: PassGrammars, num_emitted_B: Tensor, *values: Any) -> None:
        tell(self, num_emitted_B, *values)
        clock.begin("choice_wait_ms", num_emitted_B.device)

    def choose_then(self: Step, batch: Batch) -> None:
        choose_in_place(self, batch)
        # A pass that is captured has no grammars.
        if batch.grammars is not None:
            clock.end("choice_wait_ms", batch.lanes_B.device)

    patches = {
        "choose_drafts": choose_after_waiting,
        "bits": lambda *values: clock.host("bits_ms", bits, *values),
        "masked": masked_later,
        "tell": tell_then,
    }
    of_step = {"choose_drafts": choose_then, "decide": lambda *all_: clock.host("decide_ms", decide, *all_)}
    with (
        mock.patch.multiple(PassGrammars, **patches),
        mock.patch.multiple(Step, **of_step),
        mock.patch.object(masks, "_beside", beside_then),
    ):
        yield found
    found |= clock.means()


class _Clock:
    """Sums of the host's seconds, and pairs of events on the device, by name."""

    def __init__(self) -> None:
        self.num_passes, self._seconds = 0, defaultdict[str, float](float)
        self._begun = dict[str, torch.cuda.Event]()
        self._spans = defaultdict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]](list)

    def host(self, name: str, call: Callable[..., Any], *values: Any) -> Any:
        """Call, and count the time."""
        start = time.perf_counter()
        result = call(*values)
        self._seconds[name] += time.perf_counter() - start
        return result

    def begin(self, name: str, device: torch.device) -> None:
        """Of a span on the device, in the order of its stream."""
        if device.type == "cuda":
            self._begun[name] = _mark(device)

    def end(self, name: str, device: torch.device) -> None:
        """Of the span that has begun last, if one has."""
        if name in self._begun:
            self._spans[name].append((self._begun.pop(name), _mark(device)))

    def means(self) -> dict[str, float]:
        """Milliseconds of a pass with grammars; {} if there was none."""
        if not self.num_passes:
            return {}
        found = {name: 1e3 * total / self.num_passes for name, total in self._seconds.items()}
        for name, pairs in self._spans.items():
            torch.cuda.synchronize()
            found[name] = sum(start.elapsed_time(end) for start, end in pairs) / len(pairs)
        return found


def _mark(device: torch.device) -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event
