"""The definition of a lookup in a sequence's own tokens."""

from __future__ import annotations

from collections.abc import Sequence


def look_up_reference(tokens: Sequence[int], minimum: int, longest: int, num_drafts: int) -> list[int] | None:
    """The tokens after the longest match of the last tokens, the latest of equal ones; None if there is no
    match of `minimum` tokens."""
    last, best, end = len(tokens) - 1, 0, 0
    for position in range(last):
        length = 0
        while length < min(longest, position + 1) and tokens[position - length] == tokens[last - length]:
            length += 1
        if length >= max(best, minimum):
            best, end = length, position
    if not best:
        return None
    following = list(tokens[end + 1 :])
    while len(following) < num_drafts:
        following.append(following[end - last])
    return following[:num_drafts]
