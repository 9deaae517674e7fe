"""The definition of a block-diffusion pass, sequence by sequence in plain Python. Rules in README.md.

Z lanes, W positions of a block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Row = tuple[int, int, int, bool]
"""token id, slot, limit, whether it is a MASK"""


@dataclass(slots=True, kw_only=True)
class Sequence:
    """One lane as lists and numbers. `ends`: maximum length; `whole_part`: see `BlockLanes`."""

    tokens: list[int]
    num_computed: int
    ends: int
    decided: list[int | None]
    """The token decided for each place of the active block; None if undecided or known."""
    num_passes: int = 0
    num_clean_passes: int = 0
    whole_part: int = -1
    num_steps: int = 1
    threshold: float = 0.9
    edit_threshold: float = 1.0
    entropy_bound: float = 0.0

    def masks(self, size: int) -> list[int]:
        """Positions that are neither known nor decided."""
        return [w for w in range(len(self.tokens) % size, size) if self.decided[w] is None]

    def fed(self, shape: Any, num_feed: int) -> tuple[int, int]:
        """First position and number of positions of the active block that a pass computes."""
        if not shape.reuses:
            return 0, shape.size
        index = (self.masks(shape.size) or [shape.size - 1])[0]
        part = index // shape.part
        is_whole = self.whole_part != part or num_feed > 0 or (shape.shifted and index % shape.part == 0)
        return (0, shape.size) if is_whole else (part * shape.part, shape.part)


def pack_reference(
    sequences: list[tuple[Sequence, int, bool]], shape: Any, num_rows: int | None
) -> list[tuple[list[Row], int, bool, list[int]]]:
    """For every (sequence, tokens that the host has counted, whether it decodes): its rows, how many of them
    are stored, whether it decides something, and the positions that it may decide."""
    size, uncounted, counted = shape.size, 0, 0
    due = []
    for sequence, num_counted, decodes in sequences:
        advances = len(sequence.tokens) < sequence.ends
        num_feed = len(sequence.tokens) // size * size - sequence.num_computed if decodes else num_counted
        due.append((num_feed if advances else 0, decodes and advances))
        counted += min(due[-1][0], num_counted)
    packed = []
    for (sequence, num_counted, _), (num_feed, wants) in zip(sequences, due, strict=True):
        denoises = wants
        if shape.shifted or not shape.fuses:
            denoises = wants and num_feed == 0
        elif num_rows is not None:
            extra = max(0, num_feed - num_counted)
            uncounted += extra
            denoises = wants and (not extra or uncounted <= num_rows - len(sequences) * size - counted)
        rows = [_row(sequence, sequence.num_computed + k, shape) for k in range(num_feed)]
        if denoises:
            first, num = sequence.fed(shape, num_feed)
            start = len(sequence.tokens) // size * size + first
            rows += [_row(sequence, slot, shape) for slot in range(start, start + num)]
        samples = wants if shape.shifted else denoises
        indices = sequence.masks(size) if samples else []
        if shape.shifted and num_feed > 0:
            indices = [w for w in indices if w == 0]
        if shape.part is not None:
            indices = [w for w in indices if w // shape.part == indices[0] // shape.part]
        packed.append((rows, num_feed, samples, indices))
    return packed


def wanted_reference(
    demand: list[list[int]], num_waits: list[int], opens: list[bool], num_wanted: int
) -> list[list[tuple[int, int]] | None]:
    """(Number of the wanted row, position) of the positions that each sequence needs; None: it waits.

    Those that open a shifted block come first, then those that have waited longest, then in order. `demand`:
    positions in ascending order; `num_waits`: passes in a row in which each waited."""
    found: list[list[tuple[int, int]] | None] = [[] for _ in demand]
    first = 0
    for b in sorted(range(len(demand)), key=lambda b: (not opens[b], -num_waits[b], b)):
        if demand[b] and first + len(demand[b]) > num_wanted:
            found[b] = None
        else:
            found[b] = [(first + number, index) for number, index in enumerate(demand[b])]
        first += len(demand[b])
    return found


def _row(sequence: Sequence, slot: int, shape: Any) -> Row:
    limit = slot // shape.size * shape.size + shape.size
    if slot < len(sequence.tokens):
        return sequence.tokens[slot], slot, limit, False
    token = sequence.decided[slot % shape.size]
    return shape.mask_token_id if token is None else token, slot, limit, token is None


def decide_reference(
    sequence: Sequence,
    shape: Any,
    rule: str,
    *,
    num_feed: int,
    samples: bool,
    indices: list[int],
    has_logits: list[bool],
    proposed: list[int],
    confidence: list[float],
    entropy: list[float],
    max_clean_passes: int | None,
    quota: int | None = None,
) -> list[int]:
    """Decide, edit and commit one sequence after a pass; returns the tokens emitted."""
    size, known = shape.size, sequence.tokens
    opens = shape.shifted and num_feed > 0
    is_open = [w for w in indices if has_logits[w]]
    if quota is None:
        quota = size // sequence.num_steps + (sequence.num_passes < size % sequence.num_steps)
    chosen = is_open if opens else _chosen(is_open, rule, quota, confidence, entropy, sequence)
    began_clean = samples and not sequence.masks(size)
    if shape.reuses and samples and not opens:
        sequence.whole_part = (sequence.masks(size) or [size - 1])[0] // shape.part
    edited = [
        w
        for w in range(int(shape.shifted), size)
        if max_clean_passes is not None and samples and not opens and has_logits[w]
        if sequence.decided[w] is not None and w >= len(known) % size
        if proposed[w] != sequence.decided[w] and confidence[w] > sequence.edit_threshold
    ]
    for w in (*chosen, *edited):
        sequence.decided[w] = proposed[w]
    sequence.num_passes += samples and not opens
    is_clean = samples and not sequence.masks(size)
    if max_clean_passes is not None:
        sequence.num_clean_passes += began_clean
        is_last = not edited or sequence.num_clean_passes >= max_clean_passes
        is_settled = sequence.edit_threshold >= 1 or (began_clean and is_last)
        sequence.num_clean_passes *= not is_settled
        is_clean = is_clean and is_settled
    sequence.num_computed += num_feed
    if not is_clean:
        return []
    emitted = [token for token in sequence.decided[len(known) % size :] if token is not None]
    known += emitted
    sequence.num_passes = 0
    sequence.whole_part = -1 if shape.reuses else sequence.whole_part
    sequence.decided = [None] * size
    return emitted


def _chosen(
    is_open: list[int],
    rule: str,
    quota: int,
    confidence: list[float],
    entropy: list[float],
    sequence: Sequence,
) -> list[int]:
    best = sorted(is_open, key=lambda w: (-confidence[w], w))[:quota]
    if rule == "sequential":
        return is_open[:quota]
    if rule == "low_confidence_static":
        return best
    if rule == "low_confidence_dynamic":
        sure = [w for w in is_open if confidence[w] > sequence.threshold]
        return sure if len(sure) >= min(quota, len(is_open)) else best
    surest = sorted(is_open, key=lambda w: (entropy[w], w))
    return [
        w
        for k, w in enumerate(surest)
        if k == 0 or sum(entropy[v] for v in surest[: k + 1]) < sequence.entropy_bound
    ]
