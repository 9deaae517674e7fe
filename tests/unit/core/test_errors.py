"""Mistakes of users as exceptions."""

from __future__ import annotations

import copy

from idlm.errors import UserError


def test_a_copy_keeps_its_parts() -> None:
    """Processes of a pool send exceptions by the same protocol."""
    error = UserError("IDLM-0108", "the conversion ended with status 2", fix="see its output above")
    sent = copy.copy(error)
    assert (str(sent), sent.code, sent.message, sent.fix) == (str(error), *(vars(error).values()))
