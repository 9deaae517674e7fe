"""Rows of a sample, what packing may and may not change, and samples that are held out."""

from __future__ import annotations

import io
from multiprocessing.reduction import ForkingPickler

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from idlm.semantics import Semantics
from idlm.train.config.schema import EvalConfig
from idlm.train.data.dataset import collate
from idlm.train.data.layout import (
    IGNORE_LABEL,
    NO_ROWS,
    Sample,
    SampleRows,
    clean_rows,
    noisy_rows,
    pack_rows,
    target_flags,
)
from idlm.train.data.packing import held_out_flags
from idlm.train.objectives.curriculum import Stage
from idlm.train.objectives.idlm import IntrospectiveConsistency

MASK = 500


def sample_of(flags: list[bool]) -> Sample:
    return Sample(token_ids=np.arange(100, 100 + len(flags)), supervised=np.asarray(flags))


def test_the_first_response_token_is_predicted_on_the_masked_path() -> None:
    sample = Sample.from_pair([1, 2, 3], [4, 5, 6])
    rows = noisy_rows(sample, mask_region="response", stride=3, mask_token_id=MASK)
    assert rows.positions.tolist() == [2, 3, 4]
    assert rows.labels.tolist() == [4, 5, 6]
    assert rows.block_starts.tolist() == [2, 2, 4]
    assert (rows.input_ids == MASK).all()


@pytest.mark.parametrize("phase", ["response", "random"])
def test_random_ids_differ_by_visit_and_change_nothing_else(phase: str) -> None:
    """They follow from the seed of the visit alone, at stride 16 too."""
    sample = sample_of([False] * 3 + [True] * 400)
    stage = Stage(index=0, stride=16, num_steps=1, clean_weight=0.0)
    settings = {"mask_region": "response", "phase": phase}
    masked = IntrospectiveConsistency(mask_token_id=MASK, **settings)
    random = IntrospectiveConsistency(mask_token_id=None, noise_range=(7, 60), **settings)
    visits = [random.rows(sample, stage, seed).noisy for seed in ((0, 1), (0, 2), (0, 1))]
    ids = [visit.input_ids for visit in visits]
    assert np.array_equal(ids[0], ids[2]) and (ids[0] == ids[1]).mean() < 0.1
    assert set(ids[0]) | set(ids[1]) == set(range(7, 60))
    expected = masked.rows(sample, stage, (0, 1)).noisy
    for name in ("positions", "block_starts", "labels"):
        assert np.array_equal(getattr(visits[0], name), getattr(expected, name))
    assert random.semantics(16) == Semantics(noise_range=(7, 60), stride=16)


@given(
    st.lists(st.booleans(), min_size=2, max_size=40),
    st.integers(2, 16),
    st.sampled_from(["response", "all"]),
    st.integers(0, 15),
)
@settings(max_examples=200, deadline=None)
def test_properties_of_the_noisy_half(flags: list[bool], stride: int, region: str, phase: int) -> None:
    sample, phase = sample_of(flags), phase % (stride - 1)
    rows = noisy_rows(sample, mask_region=region, stride=stride, mask_token_id=MASK, phase=phase)
    clean = clean_rows(sample, region)
    supervised = np.flatnonzero(clean.labels != IGNORE_LABEL)
    assert np.array_equal(rows.positions, supervised), "the halves supervise different positions"
    assert np.array_equal(rows.labels, clean.labels[supervised])
    assert np.array_equal(rows.labels, sample.token_ids[rows.positions + 1]), "labels are not shifted by one"
    offsets = rows.positions - rows.block_starts
    assert ((offsets >= 0) & (offsets < stride - 1)).all()
    assert len(sample) - 1 not in rows.positions, "the last position has no target"
    runs = np.split(rows.block_starts, np.flatnonzero(np.diff(rows.positions) != 1) + 1)
    firsts = [np.unique(run, return_counts=True)[1][0] for run in runs if len(run)]
    lengths = [len(run) for run in runs if len(run)]
    assert firsts == [min(length, stride - 1 - phase) for length in lengths], (
        "the phase shortens first blocks"
    )
    for start in np.unique(rows.block_starts):
        members = rows.positions[rows.block_starts == start]
        assert np.array_equal(members, np.arange(start, start + len(members))), "a block has a gap"
    wanted = len(flags) - 1 if region == "all" else sum(flags[1:])
    assert target_flags(sample, region).sum() == wanted


def test_a_random_phase_is_even_over_visits_and_drawn_again_alike() -> None:
    objective = IntrospectiveConsistency(mask_token_id=MASK, mask_region="response", phase="random")
    stage = Stage(index=0, stride=4, num_steps=1, clean_weight=0.2)
    sample = Sample.from_pair([1, 2, 3], list(range(10, 30)))
    visits = [objective.rows(sample, stage, (7, item, 0)).noisy.block_starts for item in range(300)]
    again = [objective.rows(sample, stage, (7, item, 0)).noisy.block_starts for item in range(300)]
    assert all(map(np.array_equal, visits, again))
    firsts = np.bincount([int((starts == 2).sum()) for starts in visits])
    assert firsts[0] == 0 and len(firsts) == 4 and firsts[1:].min() > 70


@pytest.mark.parametrize("region", ["response", "all"])
def test_packing_keeps_documents_apart_and_pads_silently(region: str) -> None:
    objective = IntrospectiveConsistency(mask_token_id=MASK, mask_region=region)
    stage = Stage(index=0, stride=3, num_steps=1, clean_weight=0.2)
    samples = [Sample.from_pair([1, 2], [3, 4, 5]), Sample.from_pair([6], [7, 8])]
    documents = [objective.rows(sample, stage) for sample in samples]
    used = sum(map(len, documents))
    row = pack_rows(documents, used + 5, pad_token_id=9)
    assert sum(objective.num_rows(len(sample), sample.num_targets) for sample in samples) == used
    assert (row["labels"][used:] == IGNORE_LABEL).all()
    assert (row["doc_ids"][used:] == -1).all()
    assert (row["input_ids"][used:] == 9).all()
    num_noisy = int(row["is_noisy"].sum())
    assert row["is_noisy"][:num_noisy].all(), "noisy rows come first"
    for doc_id, sample in enumerate(samples):
        clean = (row["doc_ids"] == doc_id) & ~row["is_noisy"]
        assert np.array_equal(row["input_ids"][clean], sample.token_ids)
        assert row["labels"][clean][-1] == IGNORE_LABEL, "something is predicted across the document boundary"


def test_a_data_worker_sends_a_batch_as_one_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = clean_rows(sample_of([False, True, True]), "response")
    packed = pack_rows([SampleRows(noisy=NO_ROWS, clean=rows)], 5, pad_token_id=0)
    batch = collate([packed | {"item_id": number, "stage": 0} for number in (3, 4)])
    found = ForkingPickler.loads(ForkingPickler.dumps(batch))
    assert list(found) == list(batch)
    for name, tensor in batch.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(found[name], tensor)
    sent: list[torch.Tensor] = []
    pickler = ForkingPickler(io.BytesIO())
    pickler.dispatch_table = {
        **pickler.dispatch_table,
        torch.Tensor: lambda one: sent.append(one) or (int, ()),
    }
    pickler.dump(batch)
    assert len(sent) == 1


Pair = tuple[list[int], list[int]]


class Pairs:
    """A finite source of pairs of prompt and answer."""

    def __init__(self, pairs: list[Pair]) -> None:
        self.pairs, self.num_samples = pairs, len(pairs)

    def sample(self, index: int) -> Sample:
        return Sample.from_pair(*self.pairs[index])


def distinct(num: int, *, prompt: bool = True) -> list[Pair]:
    return [([1, 2, number] if prompt else [1], [number, 5]) for number in range(10, 10 + num)]


def held_out(pairs: list[Pair], *, seed: int = 0, **config: float) -> list[Pair]:
    flags = held_out_flags(EvalConfig(**config), Pairs(pairs), seed=seed)  # type: ignore[arg-type]
    return [] if flags is None else [pairs[index] for index in np.flatnonzero(flags)]


@pytest.mark.parametrize("prompt", [True, False], ids=["pairs", "texts"])
@pytest.mark.parametrize(
    ("num", "share", "expected"),
    [
        (7, 0.5, 0),
        (8, 0.005, 1),
        (40, 0.005, 4),
        (500, 0.005, 16),
        (500, 0.2, 100),
        (40, 0, 0),
    ],
)
def test_a_share_is_held_out_and_of_little_data_some(
    num: int, share: float, expected: int, prompt: bool
) -> None:
    assert len(held_out(distinct(num, prompt=prompt), holdout=share)) == expected


def test_the_choice_follows_from_the_content_and_the_seed() -> None:
    pairs = distinct(100)
    chosen = held_out(pairs)
    assert sorted(held_out(pairs[::-1])) == sorted(chosen), "not from the order"
    assert held_out(pairs) == chosen != held_out(pairs, seed=1)


def test_answers_to_one_prompt_and_copies_stay_on_one_side() -> None:
    pairs = [(prompt, [*answer, number]) for prompt, answer in distinct(60) for number in (7, 8)]
    pairs += pairs[:20]
    prompts = [tuple(prompt) for prompt, _ in held_out(pairs, holdout=0.3)]
    assert prompts
    for prompt in set(prompts):
        assert prompts.count(prompt) == [tuple(other) for other, _ in pairs].count(prompt)


def test_a_prompt_of_most_samples_is_not_held_out() -> None:
    common = [([1, 2, 3], [number]) for number in range(10, 40)]
    assert held_out(common) == [], "nothing would be left to train on"
    rare = distinct(3)
    assert all(pair in rare for pair in held_out(common + rare)) and held_out(common + rare)
