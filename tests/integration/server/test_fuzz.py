"""400 requests made from the server's schema (`benchmarks.serve_fuzz`)."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.results import read_rows
from benchmarks.serving import serve_fuzz

REQUESTS = 400


@pytest.mark.sweep
def test_no_request_breaks_a_rule(tmp_path: Path) -> None:
    assert serve_fuzz.measure([f"requests={REQUESTS}", f"results={tmp_path}"]) == 0
    rows = read_rows("serve_fuzz", results=tmp_path)
    values = {(row["metric"], row["case"]["kind"]): row["value"] for row in rows}
    assert sum(values["requests", kind] for kind in serve_fuzz.KINDS) >= REQUESTS
    # Requests that are all refused would test the first check alone.
    assert 0 < values["refused", "spliced"] < 0.99
