"""Which shapes of passes a warm-up captures, compiles or times."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

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
from idlm.infer.sparse.row_reservation import head_buckets, warm_up_capacities
from idlm.infer.state.batch import BlockLimits

CONTEXT_STEP = 8
"""Between bounds of contexts that have graphs of their own. Attention reads what there is in any case."""
CAPACITIES_BETWEEN = 4
"""Of row capacities, one in so many is captured before the others, and with filters."""
LAUNCHES_PER_GRAPH = 2
"""A pass with prompts has a graph if it computes up to so many times as long as its launches take: the host
has other work meanwhile."""
MAX_TIMED_ROWS = 2048
"""A pass with more is slower for each token than one with fewer: its time is estimated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmUpShapes:
    """Shapes of an engine's passes, of at most so many sequences, tokens of one, and prompt rows."""

    decoder: Decoder
    max_sequences: int
    max_length: int
    max_prompt_rows: int

    def captured(self, eager_rows: int) -> list[PassShape]:
        """The shapes to capture, those that traffic needs most first (`_rank`). None for decoders of whole
        canvases, whose rows follow the lengths of requests."""
        kind, contexts, widths = self.decoder.kv_policy.kind, self._contexts(), self._widths()
        if kind == "none":
            return []
        is_tight = (False, True) if kind == "block" else (False,)
        shapes = [
            each
            for filters, context, tight in itertools.product((False, True), contexts, is_tight)
            for mode, width in enumerate(widths)
            # Blocks are worth graphs at every size: they have been measured with them only.
            for size in batch_sizes(
                width, self.max_sequences, eager_rows if kind == "append" else self.max_sequences * width
            )
            for each in _variants(self.decoder, self.shape(mode, size, context, filters=filters), tight)
        ]
        if kind == "append":
            shapes += [
                self.shape(mode, size, context, filters=filters, num_prompt_rows=num_rows)
                for filters, context in itertools.product((False, True), contexts)
                for mode, width in enumerate(widths)
                for num_rows in PROMPT_GRAPHS
                if num_rows < 2 * self.max_prompt_rows and self.decoder.modes[mode].narrow is None
                for size in self._mixed_sizes(mode, num_rows)
                if size * width + num_rows <= LAUNCHES_PER_GRAPH * eager_rows
            ]
        if self.decoder.takes_constraints:
            held = [
                each
                for each in shapes
                if not (each.filters or each.num_prompt_rows or self.decoder.modes[each.mode].narrow)
            ]
            shapes += [replace(each, decides=False) for each in held if each.num_sequences.bit_count() == 1]
        return sorted(shapes, key=lambda shape: (shape.max_known < contexts[0], *_rank(shape, kind)))

    def with_capacity(self) -> list[PassShape]:
        """Shapes for passes that may drop rows, by number of sequences: for powers of two capacities that
        hold what traffic needs with little padding (`warm_up_capacities`). First the largest ones, then every
        fourth, then the others; of passes with filters only every fourth."""
        policy, context = self.decoder.kv_policy, self._contexts()[0]
        found = list[tuple[float, int, PassShape]]()
        for size, filters in itertools.product(self._main_sizes(), (False, True)):
            num_stored = policy.block_size * bucket(size, FED_BLOCK_BUCKETS) if policy.fused_commit else 0
            shape = self.shape(0, size, context, filters=filters, num_prompt_rows=num_stored)
            capacities = warm_up_capacities(size, policy.block_size, shape.num_rows + num_stored)
            for number, capacity in enumerate(capacities[:: CAPACITIES_BETWEEN if filters else 1]):
                rank = min(number, 1) + (not filters and number % CAPACITIES_BETWEEN > 0) + 0.5 * filters
                found.append((rank, -size, replace(shape, payload=BlockLimits(capacity=capacity))))
        return [shape for _, _, shape in sorted(found, key=lambda each: each[:2])]

    def compiled(self) -> list[PassShape]:
        """Decoding passes that between them need all kernels."""
        context, modes = self._contexts()[0], range(len(self.decoder.modes))
        sizes = self._main_sizes()
        shapes = [self.shape(mode, size, context, filters=size == 1) for mode in modes for size in sizes]
        return [replace(shape, changes=shape.filters) for shape in shapes]

    def timed(self) -> dict[tuple[int, int], PassShape]:
        """Decoding passes by mode and number of sequences, from whose times those of all follow."""
        context = self._contexts()[0]
        return {
            (mode, size): self.shape(mode, size, context)
            for mode, width in enumerate(self._widths())
            for size in self._main_sizes()
            if size == 1 or size * width <= MAX_TIMED_ROWS
        }

    def prompts(self, eager_rows: int) -> list[PassShape]:
        """Shapes with prompts, the largest first, that between them need all kernels of such passes."""
        if self.decoder.kv_policy.kind != "append":
            return []
        context, rows, widths = self._contexts()[0], [PROMPT_STEP], self._widths()
        sizes = {1, *(padded_sequences(-(-self.max_sequences // part)) for part in (8, 4, 1))}
        while rows[-1] < self.max_prompt_rows:
            rows.append(min(4 * rows[-1], -(-self.max_prompt_rows // PROMPT_STEP) * PROMPT_STEP))
        bounds = [(context, num_rows) for num_rows in rows]
        # Where all contexts are short, attention has other kernels.
        bounds += [(short, rows[0]) for short in (MIN_SLOTS, 2 * MIN_SLOTS) if short < context]
        shapes = [
            self.shape(mode, size, bound, num_prompt_rows=num_rows)
            for mode in {0, len(widths) - 1}
            for size in sizes
            for bound, num_rows in bounds
            if num_rows + size * widths[mode] <= self.max_prompt_rows + eager_rows
        ]
        return sorted(shapes, key=lambda shape: -shape.all_rows)

    def shape(
        self, mode: int, size: int, context: int, *, filters: bool = False, num_prompt_rows: int = 0
    ) -> PassShape:
        """One shape of `size` sequences, with contexts of `context` tokens at most."""
        width = self._widths()[mode]
        return PassShape(
            mode=mode,
            num_sequences=size,
            num_rows=size * width,
            max_rows=width,
            num_prompt_rows=num_prompt_rows,
            max_known=context,
            filters=filters,
            num_top=None,
            payload=BlockLimits() if self.decoder.kv_policy.kind == "block" else None,
        )

    def _widths(self) -> tuple[int, ...]:
        return rows_by_mode(self.decoder, self.max_length)

    def _mixed_sizes(self, mode: int, num_prompt_rows: int) -> list[int]:
        """Numbers of sequences of passes with prompts. With prompts a mode with drafts is used only while
        its rows are few: beyond that they take as long as those of prompts."""
        widths, maximum = self._widths(), self.max_sequences
        if widths[mode] > min(widths):
            maximum = min(maximum, max(1, FREE_ROWS // widths[mode]))
        return mixed_sizes(widths[mode], num_prompt_rows, maximum)

    def _main_sizes(self) -> list[int]:
        """Powers of two of sequences, and the most, ascending."""
        powers = {1 << power for power in range(self.max_sequences.bit_length())}
        return sorted(powers | {padded_sequences(self.max_sequences)})

    def _contexts(self) -> list[int]:
        """Bounds of known tokens, the largest first."""
        bounds = [slots_bucket(self.max_length)]
        while bounds[-1] // CONTEXT_STEP >= 2 * PROMPT_STEP * CONTEXT_STEP:
            bounds.append(slots_bucket(bounds[-1] // CONTEXT_STEP))
        return bounds


def _rank(shape: PassShape, kind: str) -> tuple[float, int]:
    """Capture order: powers of two of sequences, passes with prompts, sizes in between, grammars; each
    without filters somewhat before, and the largest first, whose memory the others use again."""
    rank = 1.5 if shape.num_prompt_rows and kind == "append" else min(3, shape.num_sequences.bit_count())
    return (rank if shape.decides else 6) + 1.5 * shape.filters, -shape.all_rows


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


def measured_shapes(shapes: list[PassShape]) -> list[PassShape]:
    """Those of `shapes` that measure what rows take (`PassCosts.by_rows`): of the fewest sequences for each
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
