"""Captures the graphs that traffic will need before the first request, and measures step times meanwhile.

Passes that only decode get a graph for every mode and, in steps of an eighth, every number of sequences;
passes that also store a few prompt rows for every power of two of sequences. Passes of more rows than
`eager_rows` need none: the host launches their kernels while the device computes the passes before.
"""

from __future__ import annotations

import functools
import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from idlm import __version__
from idlm.devices import is_out_of_memory, memory_bytes
from idlm.infer.decoders.base import Decoder, rows_by_mode
from idlm.infer.models.loader import LoadedModel, slot_share
from idlm.infer.parts import EngineParts, WarmUp
from idlm.infer.runtime.graphs.compile_ahead import compile_ahead, is_plain, step_on_meta
from idlm.infer.runtime.graphs.cuda_graphs import MAX_CUDA_GRAPHS, StaticStep
from idlm.infer.runtime.graphs.pass_shape import (
    FED_BLOCK_BUCKETS,
    MIN_SLOTS,
    PROMPT_GRAPHS,
    PROMPT_STEP,
    PassShape,
    batch_sizes,
    bucket,
    padded_sequences,
    slots_bucket,
)
from idlm.infer.runtime.stride_controller import StepTimes, cache_file, read_times, write_times
from idlm.infer.sparse.row_reservation import capacities_ahead, head_buckets
from idlm.infer.state.batch import BlockLimits
from idlm.kernels.backend import only_compiled
from idlm.log import get_logger

AUTO_SECONDS = 20.0
"""Seconds of captures with warmup=auto; after `full`, none is missing."""
LAUNCH_SECONDS = 4e-4
"""Host time of a layer that is launched kernel by kernel, before it is measured: about 20 launches."""
TIMED_LAUNCHES = 3
MAX_TIMED_ROWS = 2048
"""A pass with more is slower for each token than one with fewer: its time is estimated."""
FLOPS = 8e14
"""Of matrix products with hundreds of rows, on an H200: 768 rows of Qwen3-8B take 13.9 ms."""
MIN_EAGER_ROWS = 512
CONTEXT_STEP = 8
"""Between bounds of contexts that have graphs of their own. Attention reads what there is in any case."""
CAPACITIES_BETWEEN = 4
"""Of row capacities, one in so many is captured before the others, and with filters."""
TIMED_SETTINGS = ("weights", "kv_cache", "attention", "deterministic", "tensor_parallel", "accelerators")


def eager_rows(model: LoadedModel, launch_seconds: float | None = None) -> int:
    """Rows of a pass that computes as long as the host takes to launch its kernels one by one, which is
    `launch_seconds` (None: not measured)."""
    num_parameters = sum(weight.numel() for weight in model.trunk.parameters())
    if launch_seconds is None:
        launch_seconds = model.spec.num_layers * LAUNCH_SECONDS
    return max(MIN_EAGER_ROWS, int(launch_seconds * FLOPS / (2 * num_parameters)))


def warm_up(
    parts: EngineParts, *, is_alone: bool, assemble: Callable[..., EngineParts] | None = None
) -> WarmUp:
    """Capture ahead what `parts` may need, as `warmup` of its settings says, and give the stride controller
    the times of passes; logs what was done. `assemble`: that of `infer/build.py`, to compile kernels first;
    None: they are compiled as they are launched. Not `is_alone`: a rank of several, whose clock, memory and
    files decide nothing (`EngineSettings.warms_up`)."""
    step, settings, device = parts.step, parts.settings, parts.table.device
    if not settings.warms_up or not isinstance(step, StaticStep) or not step.captures:
        return WarmUp()
    start_time, free = time.monotonic(), memory_bytes(device)[0]
    path = cache_file(timing_key(parts)) if _needs_times(parts) else None
    known = read_times(path) if path is not None and is_alone else {}
    work = _Work(parts=parts, step=step, is_alone=is_alone, min_memory=free // 2, times=dict(known))
    if assemble is not None and is_alone and is_plain(parts):
        work.compile(assemble)
    try:
        work.capture()
    except RuntimeError as error:
        if not is_out_of_memory(error) or not is_alone:
            raise
        get_logger(__name__).warning("warm-up: no memory for more graphs: %s", error)
    step.is_warm = work.num_captured > 0
    if device.type == "cuda":
        # What the stream of first passes has freed.
        torch.cuda.empty_cache()
    if path is not None and work.times:
        set_step_times(parts, work.times)
        if is_alone and work.times != known and work.times.keys() >= work.timed.keys():
            write_times(path, work.times)
    done = WarmUp(
        num_graphs=work.num_captured,
        num_wanted=len(work.shapes),
        num_bytes=max(0, free - memory_bytes(device)[0]),
        seconds=time.monotonic() - start_time,
    )
    get_logger(__name__).info(
        "warm-up: %d of %d CUDA graphs in %.1f s and %.2f GB; passes of more than %d rows are eager",
        *(done.num_graphs, done.num_wanted, done.seconds, done.num_bytes / 1e9, step.eager_rows),
    )
    return done


@dataclass(slots=True, kw_only=True)
class _Work:
    """A warm-up in progress: the `shapes` to capture, of which the first `num_captured` are; those that are
    `timed`, and `times` by the same keys."""

    parts: EngineParts
    step: StaticStep
    is_alone: bool
    min_memory: int
    times: dict[tuple[int, int], float]
    shapes: list[PassShape] = field(default_factory=list)
    timed: dict[tuple[int, int], PassShape] = field(default_factory=dict)
    num_captured: int = 0
    end_time: float = math.inf

    def compile(self, assemble: Callable[..., EngineParts]) -> None:
        """Compile all kernels; every one is needed, so that this has no limit of time."""
        start_time = time.monotonic()
        needed = [*self._prompts(), *compiled_shapes(self.parts.decoder, *self._limits())]
        logger = get_logger(__name__)
        try:
            with only_compiled():
                num_compiled = compile_ahead(step_on_meta(self.parts, assemble), needed)
        except Exception as error:
            # A plug-in may read tensors, and the server was ready to start without this.
            logger.warning("warm-up: kernels are compiled by the passes that launch them: %s", error)
            return
        taken = time.monotonic() - start_time
        logger.info("warm-up: %d kernels compiled or loaded in %.1f s", num_compiled, taken)

    def capture(self) -> None:
        """Run passes that stay eager, then capture graphs, and time some of both."""
        parts, step, prompts = self.parts, self.step, self._prompts()
        is_cuda = parts.table.device.type == "cuda"
        if parts.settings.warmup == "auto":
            self.end_time = time.monotonic() + AUTO_SECONDS
        for shape in prompts:
            if self._may_continue():
                step.run(shape)
        if prompts and self.is_alone and is_cuda:
            step.eager_rows = eager_rows(parts.model, _launch_seconds(step, prompts[-1]))
        self.shapes = (
            shapes_with_capacity(parts.decoder, *self._limits())
            if parts.drops_rows
            else shapes_ahead(parts.decoder, *self._limits(), step.eager_rows)
        )[:MAX_CUDA_GRAPHS]
        self.timed = timed_shapes(parts.decoder, *self._limits()) if _needs_times(parts) else {}
        for key, shape in self.timed.items():
            if shape.all_rows > step.eager_rows and key not in self.times and self._may_continue():
                self.times[key] = step.seconds(shape)
        if is_cuda:
            torch.cuda.empty_cache()
        for shape in self._ordered():
            if not self._may_continue():
                return
            step.capture(shape, frees_memory=False)
            self.num_captured += 1
            key = shape.mode, shape.num_sequences
            if self.timed.get(key) == shape and key not in self.times:
                self.times[key] = step.seconds(shape)

    def _ordered(self) -> Iterator[PassShape]:
        """The shapes to capture: those that are timed, then those of the modes that these times speak for."""
        timed = set(self.timed.values())
        yield from (shape for shape in self.shapes if shape in timed)
        others = [shape for shape in self.shapes if shape not in timed]
        controller = self.parts.stride_controller
        if controller is not None and self.times and self.is_alone:
            set_step_times(self.parts, self.times)
            likely = functools.cache(controller.likely_modes)
            others.sort(key=lambda shape: shape.mode not in likely(shape.num_sequences))
        yield from others

    def _may_continue(self) -> bool:
        has_memory = memory_bytes(self.parts.table.device)[0] >= self.min_memory
        return not self.is_alone or (has_memory and time.monotonic() <= self.end_time)

    def _limits(self) -> tuple[int, int]:
        return self.parts.settings.max_sequences, self.parts.table.max_length

    def _prompts(self) -> list[PassShape]:
        parts, rows = self.parts, self.step.eager_rows
        return prompt_shapes(parts.decoder, *self._limits(), rows, max_prompt_rows=parts.settings.row_budget)


def _needs_times(parts: EngineParts) -> bool:
    """Whether a stride controller can use the times of passes without sequences. Padding reaches no expert,
    so with experts such passes take about the same time at every size."""
    return parts.stride_controller is not None and parts.model.local.moe is None


def _launch_seconds(step: StaticStep, shape: PassShape) -> float:
    """Host time of launching a pass kernel by kernel, its kernels being compiled."""
    found = []
    for _ in range(TIMED_LAUNCHES):
        torch.cuda.synchronize()
        start_time = time.perf_counter()
        step.run(shape)
        found.append(time.perf_counter() - start_time)
    return min(found)


def set_step_times(parts: EngineParts, times: Mapping[tuple[int, int], float]) -> None:
    """Give the stride controller the times. The shortest pass reads all weights, and keys and values are read
    as fast."""
    controller, model = parts.stride_controller, parts.model
    assert controller is not None
    itemsize = 1 if parts.settings.kv_cache == "fp8" else model.dtype.itemsize
    controller.times = StepTimes(
        measured=times,
        widths=rows_by_mode(parts.decoder, parts.table.max_length),
        seconds_per_slot=slot_share(model, itemsize) * min(times.values()),
    )


def timing_key(parts: EngineParts) -> dict[str, Any]:
    """What the times of passes depend on."""
    model, settings, device = parts.model, parts.settings, parts.table.device
    return {
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "versions": [__version__, torch.__version__],
        "model": asdict(model.local),
        "dtype": str(model.dtype),
        "options": {name: getattr(settings, name) for name in TIMED_SETTINGS},
        "modes": [asdict(mode) for mode in parts.decoder.modes],
        "adapted": getattr(model.trunk, "is_adapted", False),
    }


def shapes_ahead(decoder: Decoder, max_sequences: int, max_length: int, eager_rows: int) -> list[PassShape]:
    """The shapes to capture, those that traffic needs most first (`_rank`). None for decoders of whole
    canvases, whose rows follow the lengths of requests."""
    kind = decoder.kv_policy.kind
    if kind == "none":
        return []
    shapes, contexts = [], _contexts(max_length)
    for filters, context, is_tight in itertools.product(
        (False, True), contexts, (False, True) if kind == "block" else (False,)
    ):
        shapes += [
            each
            for mode in range(len(decoder.modes))
            for size in batch_sizes(
                decoder.num_rows(mode, max_length),
                max_sequences,
                # Blocks are worth graphs at every size: they have been measured with them only.
                eager_rows if kind == "append" else max_sequences * decoder.num_rows(mode, max_length),
            )
            for each in _variants(
                decoder, _shape(decoder, mode, size, max_length, context, filters), is_tight
            )
        ]
    if kind == "append":
        shapes += [
            replace(shape, num_prompt_rows=num_rows)
            for shape in shapes
            for num_rows in PROMPT_GRAPHS
            if shape.num_sequences.bit_count() == 1 and shape.num_rows + num_rows <= eager_rows
        ]
    if decoder.takes_constraints:
        held = [each for each in shapes if not each.filters and not each.num_prompt_rows]
        shapes += [replace(each, decides=False) for each in held if each.num_sequences.bit_count() == 1]
    return sorted(shapes, key=lambda shape: (shape.max_known < contexts[0], *_rank(shape, kind)))


def shapes_with_capacity(decoder: Decoder, max_sequences: int, max_length: int) -> list[PassShape]:
    """Shapes for passes that may drop rows, by number of sequences: for powers of two capacities that hold
    what traffic needs with little padding (`capacities_ahead`). First the largest ones, then every fourth,
    then the others; of passes with filters only every fourth."""
    policy, context = decoder.kv_policy, _contexts(max_length)[0]
    found = list[tuple[float, int, PassShape]]()
    for size, filters in itertools.product(_main_sizes(max_sequences), (False, True)):
        shape = _shape(decoder, 0, size, max_length, context, filters)
        num_stored = policy.block_size * bucket(size, FED_BLOCK_BUCKETS) if policy.fused_commit else 0
        capacities = capacities_ahead(size, policy.block_size, shape.num_rows + num_stored)
        for number, capacity in enumerate(capacities[:: CAPACITIES_BETWEEN if filters else 1]):
            rank = min(number, 1) + (not filters and number % CAPACITIES_BETWEEN > 0) + 0.5 * filters
            found.append(
                (
                    rank,
                    -size,
                    replace(shape, num_prompt_rows=num_stored, payload=BlockLimits(capacity=capacity)),
                )
            )
    return [shape for _, _, shape in sorted(found, key=lambda each: each[:2])]


def _rank(shape: PassShape, kind: str) -> tuple[float, int]:
    """Capture order: powers of two of sequences, passes with prompts, sizes in between, grammars; each
    without filters somewhat before, and the largest first, whose memory the others use again."""
    rank = 1.5 if shape.num_prompt_rows and kind == "append" else min(3, shape.num_sequences.bit_count())
    return (rank if shape.decides else 6) + 1.5 * shape.filters, -shape.all_rows


def compiled_shapes(decoder: Decoder, max_sequences: int, max_length: int) -> list[PassShape]:
    """Decoding passes that between them need all kernels."""
    context = _contexts(max_length)[0]
    return [
        _shape(decoder, mode, size, max_length, context, filters=size == 1)
        for mode in range(len(decoder.modes))
        for size in _main_sizes(max_sequences)
    ]


def timed_shapes(decoder: Decoder, max_sequences: int, max_length: int) -> dict[tuple[int, int], PassShape]:
    """Decoding passes by mode and number of sequences, from whose times those of all follow."""
    context = _contexts(max_length)[0]
    return {
        (mode, size): _shape(decoder, mode, size, max_length, context, filters=False)
        for mode in range(len(decoder.modes))
        for size in _main_sizes(max_sequences)
        if size == 1 or size * decoder.num_rows(mode, max_length) <= MAX_TIMED_ROWS
    }


def prompt_shapes(
    decoder: Decoder, max_sequences: int, max_length: int, eager_rows: int, *, max_prompt_rows: int
) -> list[PassShape]:
    """Shapes of passes with prompts, the largest first, that between them need all kernels of such passes."""
    if decoder.kv_policy.kind != "append":
        return []
    context, rows = _contexts(max_length)[0], [PROMPT_STEP]
    sizes = {1, *(padded_sequences(-(-max_sequences // part)) for part in (8, 4, 1))}
    while rows[-1] < max_prompt_rows:
        rows.append(min(4 * rows[-1], -(-max_prompt_rows // PROMPT_STEP) * PROMPT_STEP))
    bounds = [(context, num_rows) for num_rows in rows]
    # Where all contexts are short, attention has other kernels.
    bounds += [(short, rows[0]) for short in (MIN_SLOTS, 2 * MIN_SLOTS) if short < context]
    shapes = [
        replace(_shape(decoder, mode, size, max_length, bound, filters=False), num_prompt_rows=num_rows)
        for mode in {0, len(decoder.modes) - 1}
        for size in sizes
        for bound, num_rows in bounds
        if num_rows + size * decoder.num_rows(mode, max_length) <= max_prompt_rows + eager_rows
    ]
    return sorted(shapes, key=lambda shape: -shape.all_rows)


def _main_sizes(max_sequences: int) -> list[int]:
    """Powers of two of sequences, and the most, ascending."""
    powers = {1 << power for power in range(max_sequences.bit_length())}
    return sorted(powers | {padded_sequences(max_sequences)})


def _contexts(max_length: int) -> list[int]:
    """Bounds of known tokens, the largest first."""
    bounds = [slots_bucket(max_length)]
    while bounds[-1] // CONTEXT_STEP >= 2 * PROMPT_STEP * CONTEXT_STEP:
        bounds.append(slots_bucket(bounds[-1] // CONTEXT_STEP))
    return bounds


def _shape(decoder: Decoder, mode: int, size: int, max_length: int, context: int, filters: bool) -> PassShape:
    width = decoder.num_rows(mode, max_length)
    return PassShape(
        mode=mode,
        num_sequences=size,
        num_rows=size * width,
        max_rows=width,
        num_prompt_rows=0,
        max_known=context,
        filters=filters,
        num_top=None,
        payload=BlockLimits() if decoder.kv_policy.kind == "block" else None,
    )


def _variants(decoder: Decoder, shape: PassShape, is_tight: bool) -> list[PassShape]:
    """A decoder of blocks also feeds clean blocks, and reserves rows of the head: as many as all passes need,
    or with `is_tight` as those that need less."""
    policy = decoder.kv_policy
    if policy.kind == "append":
        return [shape]
    least = -(-shape.num_sequences // 8) if policy.fused_commit else 0
    clean = [policy.block_size * bucket(count, FED_BLOCK_BUCKETS) for count in (2 * least, least)]
    num_wanted = head_buckets(shape.num_sequences, policy.block_size)
    return [
        replace(shape, num_prompt_rows=num_rows, payload=BlockLimits(num_wanted=num))
        for num_rows in (clean[1:] if is_tight else dict.fromkeys(clean))
        for num in (num_wanted[1:] if is_tight else num_wanted[:1])
    ]
