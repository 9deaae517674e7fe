"""How many Python functions the host calls for a sequence and pass, over a stub of the device."""

from __future__ import annotations

import pytest

from tests.unit.engine.host import calls_of, stubbed


@pytest.mark.sweep_but("generate-isd-13")
@pytest.mark.parametrize(
    ("reader", "decoder", "maximum"),
    [("generate", "ar", 7), ("generate", "isd", 13), ("stream", "ar", 10), ("stream", "isd", 15)],
)
def test_a_sequence_takes_few_calls_in_a_pass(reader: str, decoder: str, maximum: int) -> None:
    run, stub = stubbed(decoder, reader, num_sequences=64, num_passes=64, stride=4)
    stub.num_pairs = 0
    assert 1 < calls_of(run) / stub.num_pairs <= maximum
