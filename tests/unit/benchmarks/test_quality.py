"""What the benchmarks of quality measure on toys, what they judge, and how sure a difference is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.quality import law, sparse_fidelity
from benchmarks.results import read_rows
from idlm.infer.decoders import isd
from idlm.semantics import Semantics
from idlm.tasks.tokenizer import save_tokenizer
from tests.toy import write_toy_checkpoint

SMALL = ["draws=1000", "device=cpu", "workers=1", "lanes=256", "faults=false"]


def test_a_wrong_law_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts by argmax, tested with the softmax."""
    draw = isd.emit_and_draft
    monkeypatch.setattr(
        isd, "emit_and_draft", lambda *args, **more: draw(*args, **more | {"takes_best": True})
    )
    assert law.measure([*SMALL, "cases=4-cold", f"results={tmp_path}"]) == 1
    [row] = read_rows("law", results=tmp_path)
    assert not row["gate_passed"]


SIZE = 8
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A block-diffusion checkpoint of random weights with the tasks' tokenizer."""
    directory = tmp_path_factory.mktemp("model")
    num_ids = save_tokenizer(directory, "recall")
    write_toy_checkpoint(directory, vocab_size=num_ids + 1, num_layers=3)
    Semantics(
        causality="block", logit_shift=False, block_size=SIZE, mask_token_id=num_ids, stop_token_ids=(2,)
    ).save(directory)
    return directory


def test_rows_of_a_run(model: Path, tmp_path: Path) -> None:
    sizes = "level=tiny contexts=64,96 records=8 parts=4 sets_parts=4 steps=4 exact_layers=1 num=3 sets_num=2"
    options = f"sets_context=96 max_tokens=24 batch=2 device=cpu record=true results={tmp_path}"
    assert sparse_fidelity.measure([f"model={model}", f"base={model}", *sizes.split(), *options.split()]) == 0
    rows = read_rows("sparse_fidelity", results=tmp_path)
    cases = {
        metric: [row["case"] for row in rows if row["metric"] == metric]
        for metric in ("oracle_recall", "estimation_accuracy", "needle_accuracy", "agreement_with_exact")
    }
    steps = [case["step"] for case in cases["oracle_recall"] if case["model"] == "base"]
    assert steps == [2, 3, 4, "mean", "mean", "mean"]
    assert [case["arm"] for case in cases["estimation_accuracy"]] == ["mage", "quest", "sparsed", "oracle"]
    # Exact attention at both contexts, the arms at the better one.
    assert [case["arm"] for case in cases["needle_accuracy"]] == [*["exact"] * 2, "mage", "quest", "sparsed"]
    assert [case["arm"] for case in cases["agreement_with_exact"]] == ["mage", "quest", "sparsed"]
    values = {(row["metric"], *row["case"].values()): row["value"] for row in rows}
    # The same weights: the base's sets are the model's.
    assert values["oracle_recall", "trained", "1/4", 96, 2] == values["oracle_recall", "base", "1/4", 96, 2]
