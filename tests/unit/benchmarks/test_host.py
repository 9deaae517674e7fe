"""How many Python functions the host calls for each sequence and pass, which bounds its time anywhere."""

from __future__ import annotations

import signal

import pytest

from benchmarks.serving.host import Case


@pytest.mark.parametrize(
    ("reader", "decoder", "maximum"),
    [("generate", "ar", 11), ("generate", "isd", 17), ("stream", "ar", 19), ("stream", "isd", 25)],
)
def test_the_books_of_a_sequence_take_few_calls(reader: str, decoder: str, maximum: int) -> None:
    case = Case(reader, decoder, 64, stride=4, num_passes=64)
    assert 1 < case.calls() <= maximum


def test_calls_do_not_depend_on_what_the_process_ran_before() -> None:
    case = Case("generate", "ar", 4, stride=1, num_passes=8)
    calls = case.calls()
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        assert case.calls() == calls
    finally:
        signal.signal(signal.SIGTERM, before)
