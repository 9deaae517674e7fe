"""Mistakes of users as exceptions."""

from __future__ import annotations

import pickle

from idlm.errors import UserError


def test_an_error_of_another_process_keeps_its_parts() -> None:
    error = UserError("IDLM-0108", "the conversion ended with status 2", fix="see its output above")
    sent = pickle.loads(pickle.dumps(error))  # noqa: S301 - our own bytes
    assert (str(sent), sent.code, sent.message, sent.fix) == (str(error), *(vars(error).values()))
