"""Several sources as one: shares by weight, whole records held out, and mixtures that are refused."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from idlm.config.compose import compose
from idlm.errors import UserError
from idlm.train.check import check_config
from idlm.train.config.data import DataConfig, SourceConfig
from idlm.train.config.schema import EvalConfig, TrainConfig
from idlm.train.data.base import open_source
from idlm.train.data.cache import CachedSource, MixedSource, _visits
from idlm.train.data.checks import inspect_data
from idlm.train.data.dataset import PackedDataset
from idlm.train.data.packing import held_out_flags
from idlm.train.objectives.idlm import IntrospectiveConsistency
from tests.errors import refused
from tests.unit.data.cached import write_lines
from tests.unit.data.files.test_data_cache import MASK, encoder_of, write


def mixture(folder: Path, tokenizer, *, weights: tuple[float, float] = (1.0, 3.0)) -> MixedSource:
    """40 pairs and 60 texts."""
    parts = [
        write(folder / "a.jsonl", 40),
        write_lines(folder / "b.jsonl", *({"text": f"Lea has {i}."} for i in range(60))),
    ]
    sources = [SourceConfig(path=str(p), weight=w) for p, w in zip(parts, weights, strict=True)]
    data = DataConfig(sources=sources, cache_dir=str(folder / "cache"))
    source = open_source(data, encoder_of(tokenizer), output_dir=str(folder / "out"))
    assert isinstance(source, MixedSource)
    return source


def test_an_epoch_has_the_shares_of_the_weights_and_every_sample(tmp_path: Path, tokenizer) -> None:
    source = mixture(tmp_path, tokenizer)
    origins = Counter(source.sample(index).origin for index in range(source.num_samples))
    by_file = {name: [num for origin, num in origins.items() if name in origin] for name in ("a.j", "b.j")}
    # 40 pairs last longest for a quarter of the samples: 40 of 160, next to two visits of the 60 texts.
    assert by_file == {"a.j": [1] * 40, "b.j": [2] * 60}
    for index in (0, 39, 40, 159):
        sample = source.sample(index)
        assert (len(sample), sample.num_targets) == (source.lengths[index], source.num_targets[index])
    again = mixture(tmp_path, tokenizer)
    assert again.digest() == source.digest()
    assert np.array_equal(again.lengths, source.lengths)
    other = mixture(tmp_path, tokenizer, weights=(1.0, 2.0))
    assert other.digest() != source.digest()
    # 60 texts, and 40 pairs for half as many: all pairs once, texts 4/3 times.
    assert other.num_samples == 120


@given(st.integers(1, 50), st.integers(1, 200))
def test_visits_differ_by_at_most_one(size: int, count: int) -> None:
    visits = np.bincount(_visits(size, count, seed=[0, 1]), minlength=size)
    assert visits.sum() == count
    assert visits.max() - visits.min() <= 1


def test_a_mixture_is_packed_reported_and_held_out_like_a_file(tmp_path: Path, tokenizer) -> None:
    source = mixture(tmp_path, tokenizer)
    flags = held_out_flags(EvalConfig(every=5, holdout=0.2), source, seed=0)
    assert flags is not None and 0 < flags.sum() < len(flags)
    held_out = {source.sample(int(index)).origin for index in np.flatnonzero(flags)}
    trained = {source.sample(int(index)).origin for index in np.flatnonzero(~flags)}
    assert not held_out & trained, "a visit of a held-out record is trained on"
    objective = IntrospectiveConsistency(mask_token_id=MASK, mask_region="response")
    dataset = PackedDataset(
        source, objective, max_length=90, row_length=200, overlong="error", pad_token_id=0, seed=1
    )
    text = "\n".join(inspect_data(DataConfig(), dataset, tokenizer).lines())
    assert "2 files, 100 records (40 of pair, 60 of text)" in text
    assert "75.0% of the samples from " in text and "b.jsonl, each 2 times an epoch" in text
    seen = Counter(index for item in range(len(dataset.rows)) for index in dataset.rows.members(item))
    assert seen == Counter(range(160))


def test_equal_content_is_refused(tmp_path: Path, tokenizer) -> None:
    parts = [write(tmp_path / name, 5) for name in ("a.jsonl", "b.jsonl")]
    data = DataConfig(sources=[SourceConfig(path=str(part)) for part in parts])
    with pytest.raises(UserError, match=r"IDLM-0238.*a.jsonl and .*b.jsonl"):
        open_source(data, encoder_of(tokenizer), output_dir=str(tmp_path / "out"))
    one = DataConfig(path=str(parts[0]))
    assert isinstance(open_source(one, encoder_of(tokenizer), output_dir=str(tmp_path / "out")), CachedSource)


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        ("[{path: A}, {path: FOLDER}]", "both hold"),
        ("[{path: A, weight: 0}]", "weight=0.0 must be above 0"),
        ("[{path: A, weight: nan}]", "finite"),
        ("[{weight: 2}]", r"data.sources\[0\].path is empty"),
        ("[{path: A, source: task}]", "source='task' is not one of"),
        ("[{path: gone.jsonl}]", r"data.sources\[0\].path: gone.jsonl does not exist"),
        ("[{path: org/chats}]", r"org/chats does not exist; a dataset of the hub needs data.source=hf"),
        ("[{path: A}] data.path=A", "exclude each other"),
    ],
)
def test_a_mixture_that_makes_no_sense_is_refused(tmp_path: Path, sources: str, message: str) -> None:
    path = write(tmp_path / "a.jsonl", 3)
    settings = sources.replace("FOLDER", str(tmp_path)).replace("A", str(path))
    given = ["data.sources=" + settings.split("] ")[0].removesuffix("]") + "]", *settings.split("] ")[1:]]
    arguments = ["objective=ar", "train.steps=3", "data.source=jsonl", *given]
    refused(message, check_config, compose("train", TrainConfig, arguments))
