"""GPU tests without warm-ups of their own: hundreds of engines would capture graphs for minutes."""

from __future__ import annotations

import pytest

from idlm.infer.runtime import warm_up


@pytest.fixture(autouse=True)
def _no_time_for_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm_up, "AUTO_SECONDS", 0.0)
