"""`<think>` blocks in training data."""

from __future__ import annotations

import pytest

from idlm.errors import UserError
from idlm.train.data.base import without_thinking


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("<think>\nhm\n</think>\n\n4", "4"),
        ("\n<think></think>4", "4"),
        ("hm</think>\n4", "4"),
        ("4", "4"),
        ("use <think>x</think> tags", "use <think>x</think> tags"),
    ],
)
def test_only_a_leading_thought_is_removed(text: str, left: str) -> None:
    assert without_thinking(text, origin="here") == left


def test_a_thought_without_an_end_is_refused() -> None:
    with pytest.raises(UserError, match=r"IDLM-0229.*here opens"):
        without_thinking("<think>and so on", origin="here")
