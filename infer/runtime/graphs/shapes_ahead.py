"""Which shapes of passes a warm-up captures, compiles or times."""

from __future__ import annotations

import itertools
from dataclasses import replace

from idlm.infer.decoders.base import Decoder, rows_by_mode
from idlm.infer.runtime.graphs.pass_shape import (
    FED_BLOCK_BUCKETS,
    MIN_SLOTS,
    PROMPT_GRAPHS,
    PROMPT_STEP,
    PassShape,
    batch_sizes,
    bucket,
    mixed_sizes,
    padded_sequences,
    slots_bucket,
)
from idlm.infer.runtime.stride_controller import FREE_ROWS
from idlm.infer.sparse.row_reservation import capacities_ahead, head_buckets
from idlm.infer.state.batch import BlockLimits

CONTEXT_STEP = 8
"""Between bounds of contexts that have graphs of their own. Attention reads what there is in any case."""
CAPACITIES_BETWEEN = 4
"""Of row capacities, one in so many is captured before the others, and with filters."""
MAX_TIMED_ROWS = 2048
"""A pass with more is slower for each token than one with fewer: its time is estimated."""


def shapes_ahead(
    decoder: Decoder, max_sequences: int, max_length: int, eager_rows: int, *, max_prompt_rows: int
) -> list[PassShape]:
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
            replace(_shape(decoder, mode, size, max_length, context, filters), num_prompt_rows=num_rows)
            for filters, context, mode in itertools.product(
                (False, True), contexts, range(len(decoder.modes))
            )
            for num_rows in prompt_sizes(max_prompt_rows)
            for size in _mixed_sizes(decoder, mode, num_rows, max_sequences, max_length)
            if size * decoder.num_rows(mode, max_length) + num_rows <= eager_rows
        ]
    if decoder.takes_constraints:
        held = [each for each in shapes if not each.filters and not each.num_prompt_rows]
        shapes += [replace(each, decides=False) for each in held if each.num_sequences.bit_count() == 1]
    return sorted(shapes, key=lambda shape: (shape.max_known < contexts[0], *_rank(shape, kind)))


def prompt_sizes(max_prompt_rows: int) -> list[int]:
    """Prompt rows of graphs for passes that store at most so many."""
    return [size for size in PROMPT_GRAPHS if size < 2 * max_prompt_rows]


def _mixed_sizes(
    decoder: Decoder, mode: int, num_prompt_rows: int, max_sequences: int, max_length: int
) -> list[int]:
    """Numbers of sequences of passes with prompts. Beside prompts a mode with drafts is used only while its
    rows are few: beyond that they take as long as those of prompts."""
    widths = rows_by_mode(decoder, max_length)
    width, maximum = widths[mode], max_sequences
    if width > min(widths):
        maximum = min(maximum, max(1, FREE_ROWS // width))
    return mixed_sizes(width, num_prompt_rows, maximum)


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


def measured_shapes(shapes: list[PassShape]) -> list[PassShape]:
    """Those of `shapes` that tell what rows take (`PassCosts.by_rows`): of the fewest sequences for each
    number of prompt rows, in the narrowest mode."""
    plain = [
        each for each in shapes if not each.filters and each.decides and each.max_known == shapes[0].max_known
    ]
    minimum = min((each.max_rows for each in plain), default=0)
    found = dict[int, PassShape]()
    for shape in sorted(plain, key=lambda each: each.num_sequences):
        if shape.max_rows == minimum:
            found.setdefault(shape.num_prompt_rows, shape)
    return list(found.values())


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
    minimum = -(-shape.num_sequences // 8) if policy.fused_commit else 0
    clean = [policy.block_size * bucket(count, FED_BLOCK_BUCKETS) for count in (2 * minimum, minimum)]
    num_wanted = head_buckets(shape.num_sequences, policy.block_size)
    return [
        replace(shape, num_prompt_rows=num_rows, payload=BlockLimits(num_wanted=num))
        for num_rows in (clean[1:] if is_tight else dict.fromkeys(clean))
        for num in (num_wanted[1:] if is_tight else num_wanted[:1])
    ]
