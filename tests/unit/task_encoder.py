"""Bulk encoder of task samples, which tests compare the tokenizer with: one dictionary, one expression."""

from __future__ import annotations

from collections.abc import Mapping

from idlm.tasks.base import TaskSample
from idlm.tasks.tokenizer import _FIND_PIECES, BOS, EOS, SEPARATOR


def num_embedding_rows(num_ids: int) -> int:
    """The embedding size for `num_ids` token ids: a multiple of 32 with at least one spare row."""
    return (num_ids // 32 + 1) * 32


class TaskEncoder:
    """`ids` is the tokenizer's `get_vocab()`."""

    def __init__(self, ids: Mapping[str, int]) -> None:
        self._ids = ids

    def encode(self, text: str) -> list[int]:
        """The ids of a task text, without specials; KeyError for an unknown word."""
        return [self._ids[piece] for piece in _FIND_PIECES(text)]

    def encode_sample(self, sample: TaskSample) -> tuple[list[int], list[int]]:
        """(prompt ids, response ids): `<bos>` prompt separator, and response `<eos>`."""
        prompt_ids = [self._ids[BOS], *self.encode(sample.prompt), self._ids[SEPARATOR]]
        return prompt_ids, [*self.encode(sample.response), self._ids[EOS]]
