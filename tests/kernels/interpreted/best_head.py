"""Greedy passes of decoder `full` with the kernel that stores no logits, in the interpreter: tokens are those
of the slow decoder. Started by test_interpreted.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from idlm.kernels import backend
from idlm.kernels.masked_logits import launch as launch_module
from tests.contracts.full.canvases import ORDERS, engine_of, slow_canvas, write_family
from tests.contracts.full.test_best_head import check_answers, greedy_cases

SMALL = launch_module.LogitsLaunch(block_x=16, block_d=32, warps=4, stages=1, group=2)


SERVED = [ORDERS[number] for number in (2, 6, 8)]


@pytest.mark.sweep_but("{'order': 'low_confidence', 'block_length': 4, 'threshold': 0.3}-{'graphs': 'on'}")
@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize(
    ("options", "settings"),
    [(options, {"graphs": "on"}) for options in SERVED] + [(ORDERS[7], {"memory": "mosaic"})],
    ids=str,
)
def test_tokens_equal_the_slow_decoder(
    tmp_path: Path, options: dict[str, Any], settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Of all kernels only this one: a whole pass takes minutes in the interpreter.
    monkeypatch.setattr(backend, "INTERPRETED", False)
    monkeypatch.setattr(launch_module, "choose", lambda *_, **__: SMALL)
    launches, run = [], launch_module.run

    def counted(*args: Any, workspace: torch.Tensor | None = None, **kwargs: Any) -> Any:
        launches.append(workspace is not None)
        return run(*args, workspace=workspace, **kwargs)

    monkeypatch.setattr(launch_module, "run", counted)
    engine = engine_of(write_family("dream", tmp_path), options, **settings)
    check_answers(engine, greedy_cases(slow_canvas("dream", options)))
    assert set(launches) == {"memory" in settings}
