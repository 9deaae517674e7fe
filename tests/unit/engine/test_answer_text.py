"""Stop strings in a growing answer, against a search of the whole text after every piece."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest

from idlm.infer.request import AnswerText
from idlm.text.detokenizer import Detokenizer

ALPHABET = "abc"


class _Letters(Detokenizer):
    """Token ids are letters."""

    def __init__(self) -> None:
        """Without a tokenizer."""

    def push(self, token_ids: Iterable[int]) -> str:
        return "".join(ALPHABET[token_id] for token_id in token_ids)

    def flush(self) -> str:
        return ""


def _cut(text: str, stops: tuple[str, ...]) -> str | None:
    """The text before the first stop string in it; None if it has none."""
    return min((text[: text.index(stop)] for stop in stops if stop in text), key=len, default=None)


@pytest.mark.parametrize("seed", range(20))
def test_text_ends_before_the_first_stop_and_is_never_taken_back(seed: int) -> None:
    dice = random.Random(seed)
    for _ in range(100):
        stops = tuple(
            "".join(dice.choices(ALPHABET, k=dice.randint(1, 5))) for _ in range(dice.randint(0, 4))
        )
        answer, text, released = AnswerText(_Letters(), stops), "", ""
        for _ in range(20):
            piece = [dice.randrange(3) for _ in range(dice.randint(0, 3))]
            text += _Letters().push(piece)
            released += answer.push(piece)
            expected = _cut(text, stops)
            assert answer.is_stopped == (expected is not None)
            if expected is not None:
                assert released == answer.text == expected
                break
            held = text.removeprefix(released)
            assert not held or any(stop.startswith(held) for stop in stops), "held back for nothing"
        released += answer.finish()
        assert released == answer.text == (text if not answer.is_stopped else _cut(text, stops))
