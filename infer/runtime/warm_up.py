"""Captures the graphs that traffic will need before the first request, and measures step times meanwhile.

Passes that only decode get a graph for every mode and, in steps of an eighth, every number of sequences that
the engine's limits allow. Passes of more rows than `eager_rows` need none: the host launches their kernels
while the device still computes the passes before. The same holds for passes with prompts, of which a request
has few; those only get their kernels compiled.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import torch

from idlm import __version__
from idlm.devices import memory_bytes
from idlm.infer.decoders.base import Decoder, rows_by_mode
from idlm.infer.errors import is_out_of_memory
from idlm.infer.models.loader import LoadedModel
from idlm.infer.parts import EngineParts, WarmUp
from idlm.infer.runtime.buckets import (
    FED_BLOCK_BUCKETS,
    PROMPT_STEP,
    bucket,
    padded_sequences,
    slots_bucket,
)
from idlm.infer.runtime.cuda_graphs import (
    CAPACITIES,
    MAX_CUDA_GRAPHS,
    STREAMED_ROWS,
    PassShape,
    StaticStep,
)
from idlm.infer.runtime.step_times import StepTimes, cache_file, read_times, write_times
from idlm.log import get_logger

AUTO_SECONDS = 20.0
"""Seconds of captures with warmup=auto; after `full`, none is missing."""
LAUNCH_SECONDS = 4e-4
"""Host time of a layer that is launched kernel by kernel: about 20 launches."""
FLOPS = 5.5e14
"""Of matrix products with hundreds of rows, on an H100 or H200."""
MIN_EAGER_ROWS = 512
CONTEXT_STEP = 8
"""Bounds of contexts that have graphs of their own. Attention reads what there is, whatever the bound."""
TIMED_SETTINGS = ("weights", "kv_cache", "attention", "deterministic", "tensor_parallel", "accelerators")


def eager_rows(model: LoadedModel) -> int:
    """Rows of a pass that computes as long as the host takes to launch its kernels one by one."""
    num_parameters = sum(weight.numel() for weight in model.trunk.parameters())
    launching = model.spec.num_layers * LAUNCH_SECONDS
    return max(MIN_EAGER_ROWS, int(launching * FLOPS / (2 * num_parameters)))


def warm_up(parts: EngineParts, *, is_alone: bool) -> WarmUp:
    """Capture ahead what `parts` may need, as `warmup` of its settings says, and tell the stride controller
    the times of passes; logs what was done.

    Ranks that share a model (not `is_alone`) must do the same, so that neither their clock, their memory nor
    files may decide: they capture all graphs (`full`) or none.
    """
    step, settings, device = parts.step, parts.settings, parts.table.device
    is_wanted = settings.warmup == "full" or (settings.warmup == "auto" and is_alone)
    if not is_wanted or not isinstance(step, StaticStep) or not step.captures:
        return WarmUp()
    start_time, free = time.monotonic(), memory_bytes(device)[0]
    limits = (settings.most_sequences, parts.table.max_length, step.eager_rows)
    shapes = shapes_ahead(parts.decoder, *limits)[:MAX_CUDA_GRAPHS]
    path = None if parts.stride_controller is None else cache_file(_said(parts))
    times = read_times(path) if path is not None and is_alone else {}
    known, captured = dict(times), 0

    def may_go_on() -> bool:
        is_late = settings.warmup == "auto" and time.monotonic() - start_time > AUTO_SECONDS
        return not is_alone or not (is_late or memory_bytes(device)[0] < free // 2)

    try:
        for shape in prompt_shapes(parts.decoder, *limits, most_prompt_rows=settings.row_budget):
            if may_go_on():
                step.run(shape)
        for shape in shapes:
            if not may_go_on():
                break
            step.capture(shape)
            captured += 1
            key = shape.mode, shape.num_sequences
            if path is not None and key not in times:
                times[key] = step.seconds(shape)
    except RuntimeError as error:
        if not is_out_of_memory(error) or not is_alone:
            raise
    step.is_warm = captured > 0
    if device.type == "cuda":
        # What the stream of first passes has freed.
        torch.cuda.empty_cache()
    if path is not None and times:
        _teach(parts, times)
        if (
            is_alone
            and times != known
            and times.keys() >= {(each.mode, each.num_sequences) for each in shapes}
        ):
            write_times(path, times)
    done = WarmUp(
        num_graphs=captured,
        num_wanted=len(shapes),
        num_bytes=max(0, free - memory_bytes(device)[0]),
        seconds=time.monotonic() - start_time,
    )
    get_logger(__name__).info(
        "warm-up: %d of %d CUDA graphs in %.1f s and %.2f GB",
        *(done.num_graphs, done.num_wanted, done.seconds, done.num_bytes / 1e9),
    )
    return done


def _teach(parts: EngineParts, times: Mapping[tuple[int, int], float]) -> None:
    """Give the stride controller the times. The shortest pass reads all weights, and keys and values are read
    as fast.
    """
    controller, local, model = parts.stride_controller, parts.model.local, parts.model
    assert controller is not None
    itemsize = 1 if parts.settings.kv_cache == "fp8" else model.dtype.itemsize
    slot_bytes = 2 * local.num_layers * local.num_kv_heads * local.head_dim * itemsize
    weight_bytes = sum(weight.numel() * weight.element_size() for weight in model.trunk.parameters())
    controller.times = StepTimes(
        measured=times,
        widths=rows_by_mode(parts.decoder, parts.table.max_length),
        seconds_per_slot=slot_bytes * min(times.values()) / max(1, weight_bytes),
    )


def _said(parts: EngineParts) -> dict[str, Any]:
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


def shapes_ahead(decoder: Decoder, most_sequences: int, max_length: int, eager_rows: int) -> list[PassShape]:
    """The shapes to capture, those that traffic needs most first: without filters, with powers of two of
    sequences, and of those the largest, whose memory the others use again. None for decoders of whole
    canvases, whose rows follow the lengths of requests.
    """
    kind = decoder.kv_policy.kind
    if kind == "none":
        return []
    shapes = []
    for filters, context, is_tight in itertools.product(
        (False, True), _contexts(max_length), (False, True) if kind == "block" else (False,)
    ):
        group = [
            each
            for mode in range(len(decoder.modes))
            for size in batch_sizes(
                decoder.num_rows(mode, max_length),
                most_sequences,
                # Blocks are worth graphs at every size: they have been measured with them only.
                eager_rows if kind == "append" else most_sequences * decoder.num_rows(mode, max_length),
            )
            for each in _variants(
                decoder, _shape(decoder, mode, size, max_length, context, filters), is_tight
            )
        ]
        shapes += sorted(group, key=lambda shape: (shape.num_sequences.bit_count() > 1, -shape.all_rows))
    return shapes


def prompt_shapes(
    decoder: Decoder, most_sequences: int, max_length: int, eager_rows: int, *, most_prompt_rows: int
) -> list[PassShape]:
    """Shapes of passes with prompts, the largest first, that between them need all kernels of such passes."""
    if decoder.kv_policy.kind != "append":
        return []
    context = _contexts(max_length)[0]
    sizes, rows = (
        {1, padded_sequences(-(-most_sequences // 8)), padded_sequences(most_sequences)},
        [PROMPT_STEP],
    )
    while rows[-1] < most_prompt_rows:
        rows.append(min(2 * rows[-1], -(-most_prompt_rows // PROMPT_STEP) * PROMPT_STEP))
    shapes = [
        replace(_shape(decoder, mode, size, max_length, context, filters=False), num_prompt_rows=num_rows)
        for mode in {0, len(decoder.modes) - 1}
        for size in sizes
        for num_rows in rows
        if num_rows + size * decoder.num_rows(mode, max_length) <= most_prompt_rows + eager_rows
    ]
    return sorted(shapes, key=lambda shape: -shape.all_rows)


def batch_sizes(width: int, most: int, most_rows: int) -> list[int]:
    """Numbers of sequences, of `width` rows each, to capture graphs of: up to `most` sequences and about
    `most_rows` rows. Padding adds a quarter of the rows at most, an eighth beyond `STREAMED_ROWS`.
    """
    sizes, size = [1], 1
    while size < most and size * width < most_rows:
        growth = 1.25 if size * width < STREAMED_ROWS else 1.125
        step = padded_sequences(size + 1) - padded_sequences(size)
        grown = int(size * growth) // step * step
        size = min(max(padded_sequences(size + 1), grown), padded_sequences(most))
        sizes.append(size)
    return sizes


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
    )


def _variants(decoder: Decoder, shape: PassShape, is_tight: bool) -> list[PassShape]:
    """A decoder of blocks also feeds clean blocks, and reserves rows (`CAPACITIES`): room for all passes, or
    with `is_tight` for those that need less.
    """
    policy = decoder.kv_policy
    if policy.kind == "append":
        return [shape]
    least = -(-shape.num_sequences // 8) if policy.fused_commit else 0
    clean = [policy.block_size * bucket(count, FED_BLOCK_BUCKETS) for count in (2 * least, least)]
    values = [
        [(name, value) for value in buckets(shape.num_sequences, policy.block_size)]
        for name, buckets in CAPACITIES.items()
    ]
    rooms: list[dict[str, Any]] = [dict(room) for room in itertools.product(*values)]
    chosen = rooms[1:] if is_tight else rooms[:1]
    return [
        replace(shape, num_prompt_rows=num_rows, **room)
        for num_rows in (clean[1:] if is_tight else dict.fromkeys(clean))
        for room in chosen
    ]
