"""How the arms of the benchmark of a training step divide it."""

from __future__ import annotations

import pytest

from benchmarks.training.train_step import ARMS, MODES, SHAPES


@pytest.mark.parametrize("name", list(SHAPES))
def test_all_lora_arms_have_the_same_rows_in_a_step(name: str) -> None:
    rows = set()
    for arm in MODES:
        assert arm in ARMS
        values = dict(text.split("=") for text in SHAPES[name].batches(arm))
        rows.add(int(values["train.batch_size"]) * int(values["train.accumulation"]))
    assert len(rows) == 1
    assert [text.partition("=")[0] for text in SHAPES[name].batches("full")] == ["train.accumulation"]
