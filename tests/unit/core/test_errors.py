"""Mistakes of users as exceptions."""

from __future__ import annotations

import copy

from idlm.cli.command import printable
from idlm.errors import UserError


def test_a_copy_keeps_its_parts() -> None:
    """Processes of a pool send exceptions by the same protocol."""
    error = UserError("IDLM-0108", "the conversion ended with status 2", fix="see its output above")
    sent = copy.copy(error)
    assert (str(sent), sent.code, sent.message, sent.fix) == (str(error), *(vars(error).values()))


def test_text_for_a_terminal_has_nothing_that_controls_it() -> None:
    given = "a\x1b[2J\x9b31m\r\x07\u202eb\ud800 é 日本\u00a0👩\n\tc"
    assert printable(given) == r"a\x1b[2J\x9b31m\r\x07\u202eb\ud800" + " é 日本\u00a0👩\n\tc"
