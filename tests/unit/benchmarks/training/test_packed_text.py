"""The text of the benchmarks: the same rows for the same seed, ids inside the vocabulary, full rows."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from benchmarks.training.packed_text import TextSource, hashed_ids, packed_batches
from idlm.errors import UserError


def test_batches_are_full_rows_of_real_text_and_repeat() -> None:
    settings = {"max_length": 64, "row_length": 128, "batch_size": 2, "stride": 3}
    first, again, other = (
        list(itertools.islice(packed_batches(5000, **settings, seed=seed), 3)) for seed in (0, 0, 1)
    )
    for batch, same in zip(first, again):
        assert all(torch.equal(batch[name], same[name]) for name in batch)
        assert batch["input_ids"].shape == (2, 128)
        assert (batch["input_ids"][batch["is_noisy"]] == 5000).all()
        assert int(batch["input_ids"][~batch["is_noisy"]].max()) < 5000
        assert int((batch["doc_ids"] < 0).sum()) == 2, (
            "a row of 64 clean and 63 noisy tokens has one row to spare"
        )
    assert not torch.equal(first[0]["input_ids"], other[0]["input_ids"])


def test_lengths_vary_on_request_and_hashes_repeat_words(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("a cat and a cat and a dog " * 50)
    source = TextSource(length=40, shortest=10, vocab_size=1000, path=str(path))
    lengths = {len(source.sample(index)) for index in range(200)}
    assert min(lengths) >= 10 and max(lengths) <= 40 and len(lengths) > 15
    assert len(set(hashed_ids(path.read_text(), 1000))) <= 6
    with pytest.raises(UserError, match="IDLM-0209"):
        TextSource(length=4, vocab_size=10, path=str(tmp_path / "absent"))
