"""Edits that delete and split positions of a block, in plain Python: a list that each pass rebuilds.

Written from the description in kernels/block_step/resizing.py; nothing of the engine is imported."""

from __future__ import annotations

from tests.block_reference import NEVER, Sampling, SlowBlocks


class SlowResizing(SlowBlocks):
    """`edit_ids`: delete and split. Counts what they did, and blocks that a last pass ended."""

    edit_ids: tuple[int, int]
    num_deleted = num_split = num_last = 0
    extra = 0
    """New masks, which a pass decides beside its quota."""

    def _block(self, known: list[int], sampling: Sampling) -> tuple[list[int], int]:
        rules, size = self.rules, self.rules.size
        number, fixed = len(known) // size, len(known) % size
        start = number * size
        work: list[int | None] = [*known[start:], *[None] * (size - fixed)]
        is_new = [False] * size
        num_passes = num_late = 0
        while True:
            masks = [index for index, token in enumerate(work) if token is None]
            num_late += all(is_new[index] for index in masks)
            is_last = num_late >= rules.edit_passes or num_passes + 1 >= size + rules.edit_passes
            rows = self._rows_of(known[:start], work)
            if is_last:
                for row in rows.values():
                    for token in self.edit_ids:
                        row[token] = NEVER
            writes: dict[int, int | None] = {}
            if rules.edit is not None:
                output = {
                    p: self._edit(rows[p], work[p], sampling) for p in range(fixed, size) if p not in masks
                }
                writes = {index: token for index, token in output.items() if token != work[index]}
            is_settled = rules.edit is None or is_last or not (masks or writes)
            self.num_edits += len(writes)
            self.extra = size if is_last else sum(is_new[index] for index in masks)
            if masks:
                writes |= self._decide({index: rows[index] for index in masks}, sampling, number, num_passes)
            work, is_new = self._rebuilt(work, is_new, writes)
            num_passes += 1
            if is_settled and None not in work:
                self.num_last += is_last
                return [token for token in work[fixed:] if token is not None], num_passes

    def _rebuilt(
        self, work: list[int | None], is_new: list[bool], writes: dict[int, int | None]
    ) -> tuple[list[int | None], list[bool]]:
        delete, split = self.edit_ids
        held: list[tuple[int | None, bool]] = []
        for index, old in enumerate(zip(work, is_new, strict=True)):
            token = writes.get(index)
            if index not in writes:
                held.append(old)
            elif token == delete:
                self.num_deleted += 1
            elif token == split:
                self.num_split += 1
                held += [(None, True), old]
            else:
                held.append((token, False))
        held = [*held, *[(None, True)] * len(work)][: len(work)]
        return [token for token, _ in held], [new for _, new in held]

    def _choose(self, scores: dict[int, float], step: int) -> list[int]:
        rules = self.rules
        steps = rules.steps or rules.size
        quota = min(rules.size // steps + (step < rules.size % steps) + self.extra, len(scores))
        if rules.strategy == "sequential":
            return sorted(scores)[:quota]
        by_confidence = sorted(scores, key=lambda index: (-scores[index], index))
        sure = [index for index in by_confidence if scores[index] > rules.threshold]
        if rules.strategy == "low_confidence_dynamic" and len(sure) >= quota:
            return sure
        return by_confidence[:quota]
