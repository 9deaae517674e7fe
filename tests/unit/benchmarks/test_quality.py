"""A wrong law fails its benchmark."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.quality import law
from benchmarks.results import read_rows
from idlm.infer.decoders import isd

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
