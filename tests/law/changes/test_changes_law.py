"""The law of answers with penalties and biases, against enumeration, for every strategy; and planted faults.

By default few draws of one strategy and two faults; the others:

    .venv/bin/python -m pytest tests/law/changes/test_changes_law.py -m "sweep or not sweep"
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from idlm.infer.decoders.rejection import STRATEGIES
from idlm.infer.state.sequence_state import LogitChanges
from idlm.kernels.logit_changes import ChangedRows, KnownTokens
from idlm.semantics import Semantics
from tests.adapters import add_selector
from tests.law.changes.law import SETTINGS, exact_law, fits
from tests.law.harness import NUM_TOKENS, VOCAB, build_engine, misfits, sample
from tests.law.stored_q import store_q_of

LEVEL = 1e-6 / 512
"""The family's level divided by at least the number of chi-square tests of this file."""
CASES: list[tuple[str, dict[str, Any]]] = [
    ("ar", {}),
    *(("isd", {"stride": 4, "rejection_strategy": name}) for name in (*STRATEGIES.names(), "branch_2")),
    ("isd", {"stride": 3, "rejection_strategy": "branch"}),
    ("isd", {"stride": 4, "rejection_strategy": "tree", "graphs": "on", "num_inflight_steps": 3}),
    ("isd", {"stride": 4, "adaptive": True}),
]
"""Adaptive ones run in the mode whose halves have different numbers of rows."""
NUM_DRAWS, LOOKS = 500, (200, 2_000)


def _name(value: Any) -> str:
    return value if isinstance(value, str) else "-".join(map(str, value.values()))


@pytest.fixture(scope="module")
def uniform(law_toy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("uniform")
    shutil.copytree(law_toy, directory, dirs_exist_ok=True)
    Semantics(noise_range=(0, VOCAB), stride=NUM_TOKENS).save(directory)
    return directory


def law_holds(law_toy: Path, directory: Path, num_draws: int, decoder: str = "isd", **options: Any) -> bool:
    """Nine settings share every pass: penalties, biases and both at three temperatures."""
    engine = build_engine(directory, decoder, num_lanes=512, **options)
    if options.get("adaptive"):
        halved = [number for number, mode in enumerate(engine.decoder.modes) if mode.narrow is not None]
        engine._stride_controller.choose = lambda load: halved[0]
    sampled = sample(engine, SETTINGS, num_draws, per_request=50)
    assert decoder == "ar" or 0.2 < sampled.acceptance < 0.9, sampled.acceptance
    found = fits(law_toy, sampled)
    assert len(found) == 2 * len(SETTINGS)
    return not misfits(found, LEVEL)


@pytest.mark.sweep_but("isd-4-tree")
@pytest.mark.parametrize(("decoder", "options"), CASES, ids=_name)
def test_answers_follow_the_changed_ar_law(law_toy: Path, decoder: str, options: dict[str, Any]) -> None:
    assert law_holds(law_toy, law_toy, NUM_DRAWS, decoder, **options)


@pytest.mark.sweep
def test_the_law_in_full(law_toy: Path) -> None:
    """Of the strategy with the most layouts, under which the faults below are detected."""
    assert law_holds(law_toy, law_toy, 6_000, stride=4, rejection_strategy="branch")


@pytest.mark.sweep
def test_random_ids_in_place_of_masks_leave_the_changed_law(law_toy: Path, uniform: Path) -> None:
    assert law_holds(law_toy, uniform, NUM_DRAWS, stride=4, rejection_strategy="tree")


@pytest.mark.sweep
def test_drafts_of_a_selector_leave_the_changed_law(law_toy: Path, tmp_path: Path) -> None:
    shutil.copytree(law_toy, tmp_path, dirs_exist_ok=True)
    add_selector(tmp_path, vocab_size=VOCAB, width=8)
    assert law_holds(law_toy, tmp_path, NUM_DRAWS, stride=4, rejection_strategy="tree")


def test_the_changed_laws_differ(law_toy: Path) -> None:
    """What the changes do is far more than what a fit lets pass."""
    starts = [exact_law(law_toy, SETTINGS[0][0], number, 1.0)[0] for number in range(3)]
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert float((starts[one] - starts[other]).abs().sum()) > 0.3


def _rows(patch: pytest.MonkeyPatch, change: Callable[[ChangedRows, KnownTokens], ChangedRows]) -> None:
    """Change rows by another number of drafts."""
    original = LogitChanges.apply

    def apply(
        self: LogitChanges, logits_XV: Tensor, known: KnownTokens, rows: ChangedRows, lanes_B: Tensor
    ) -> None:
        original(self, logits_XV, known, change(rows, known), lanes_B)

    patch.setattr(LogitChanges, "apply", apply)


def penalties_one_token_late(patch: pytest.MonkeyPatch) -> None:
    """A row does not know the draft right before it."""
    _rows(
        patch, lambda rows, _: rows._replace(num_drafts_X=rows.num_drafts_X - (rows.num_drafts_X > 0).long())
    )


def drafts_not_counted(patch: pytest.MonkeyPatch) -> None:
    _rows(patch, lambda rows, _: rows._replace(num_drafts_X=rows.num_drafts_X.clamp(max=0)))


def drafts_of_other_paths_counted(patch: pytest.MonkeyPatch) -> None:
    """Every row counts all drafts of its lane, also those after it and of earlier passes."""

    def change(rows: ChangedRows, known: KnownTokens) -> ChangedRows:
        assert known.drafts_ZN is not None
        num_drafts = known.drafts_ZN.shape[1]
        return rows._replace(num_drafts_X=rows.num_drafts_X.where(rows.num_drafts_X < 0, num_drafts))

    _rows(patch, change)


def q_without_the_changes(patch: pytest.MonkeyPatch) -> None:
    """Drafts are drawn from changed rows, and tested with the q of unchanged ones."""
    apply_of, seen = LogitChanges.apply, dict[str, Tensor]()

    def apply(self: LogitChanges, logits_XV: Tensor, *state: Any) -> None:
        seen["logits"] = logits_XV.clone()
        apply_of(self, logits_XV, *state)

    patch.setattr(LogitChanges, "apply", apply)
    store_q_of(patch, seen)


def no_repetition_penalty(patch: pytest.MonkeyPatch) -> None:
    fill = LogitChanges._fill

    def without_prompt(self: LogitChanges, requests: Any) -> None:
        fill(self, requests)
        self.lanes.penalties_Z3[:, 0] = 1.0

    patch.setattr(LogitChanges, "_fill", without_prompt)


def lanes_keep_the_settings_of_their_former_request(patch: pytest.MonkeyPatch) -> None:
    fill, filled = LogitChanges._fill, set[int]()

    def once(self: LogitChanges, requests: Any) -> None:
        new = [request for request in requests if request.lane not in filled]
        filled.update(request.lane for request in new)
        if new:
            fill(self, new)

    patch.setattr(LogitChanges, "_fill", once)


FAULTS = (
    penalties_one_token_late,
    drafts_not_counted,
    drafts_of_other_paths_counted,
    q_without_the_changes,
    no_repetition_penalty,
    lanes_keep_the_settings_of_their_former_request,
)


@pytest.mark.sweep_but("penalties_one_token_late")
@pytest.mark.parametrize("plant", FAULTS, ids=lambda plant: plant.__name__)
def test_the_fault_is_caught(
    law_toy: Path, plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    options = {"stride": 4, "rejection_strategy": "branch"}
    assert not all(law_holds(law_toy, law_toy, num_draws, **options) for num_draws in LOOKS)
