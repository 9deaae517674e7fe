"""The bound of acceptance: against a linear program, and the whole command on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.optimize import linprog

from benchmarks.quality.ceiling import highest_acceptance, measure
from benchmarks.results import read_rows


@pytest.mark.parametrize("seed", range(4))
def test_no_drafts_distribution_is_accepted_more_often(seed: int) -> None:
    rng = np.random.default_rng(seed)
    num, size = int(rng.integers(1, 7)), int(rng.integers(2, 6))
    p_KV = rng.dirichlet(np.full(size, 0.5), num)
    # max mean_k sum_v m[k, v] with m <= p, m <= q, sum q <= 1.
    objective = np.concatenate([np.full(num * size, -1 / num), np.zeros(size)])
    below_q = np.hstack([np.eye(num * size), -np.tile(np.eye(size), (num, 1))])
    total = np.concatenate([np.zeros(num * size), np.ones(size)])[None]
    solved = linprog(
        objective,
        A_ub=np.vstack([below_q, total]),
        b_ub=[*np.zeros(num * size), 1.0],
        bounds=[*((0, p) for p in p_KV.ravel()), *((0, 1) for _ in range(size))],
    )
    assert highest_acceptance(torch.from_numpy(p_KV)) == pytest.approx(-solved.fun, abs=1e-9)


def test_rows_of_a_tiny_model(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"{one} + 2 ="}) + "\n" for one in range(2)))
    small = ["answers=2", "positions=2", "continuations=8", "max_tokens=8", "drafts=2", "record=true"]
    where = ["model=recipes/assets/tiny_ar", f"prompts={prompts}", f"results={tmp_path}", "device=cpu"]
    assert measure([*where, *small]) == 0
    found = {
        (row["case"]["position"], row["case"]["estimate"]): row["value"]
        for row in read_rows("ceiling", results=tmp_path)
    }
    assert found.keys() == {(position, name) for position in (1, 2) for name in ("fitted", "held_out")}
    assert all(0 < value <= 1 + 1e-6 for value in found.values())
