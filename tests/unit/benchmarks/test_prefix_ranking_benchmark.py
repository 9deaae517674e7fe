"""benchmarks.kernels.prefix_ranking on a CPU: its gate passes right lists and stops wrong ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from benchmarks.clock import Load, read_load
from benchmarks.kernels import prefix_ranking as benchmark
from idlm.kernels.prefix_ranking import RankingPass, attention_share, rank_prefix

OPTIONS = benchmark.DEFAULTS | {"layers": "2", "k": "40"}


@pytest.mark.parametrize("fault", [None, "share", "slot", "order"])
def test_the_gate(fault: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong_lists(ranking: RankingPass, lanes_B: torch.Tensor, slots_LZKC: torch.Tensor) -> None:
        rank_prefix(ranking, lanes_B, slots_LZKC)
        if fault == "slot":
            slots_LZKC[..., 0] = (slots_LZKC[..., 0] + 1) % ranking.max_slots
        elif fault == "order":
            slots_LZKC.copy_(slots_LZKC.flip(-1))

    def wrong_shares(*given: Any) -> torch.Tensor:
        return attention_share(*given) * (1.001 if fault == "share" else 1.0)

    problem = benchmark.make_problem(OPTIONS, 2, 256, device="cpu")
    monkeypatch.setattr(benchmark, "rank_prefix", wrong_lists)
    monkeypatch.setattr(benchmark, "attention_share", wrong_shares)
    assert benchmark.check(problem) == (fault is None)
    assert problem.key_bytes == 2 * 2 * 256 * 8 * 128 * 2


def test_groups_of_layers_cover_all(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = benchmark.make_problem(OPTIONS | {"layers": "5"}, 1, 64, device="cpu")
    taken: list[tuple[int, int]] = []
    monkeypatch.setattr(benchmark, "attention_share", lambda _, first, num: taken.append((first, num)))
    benchmark._shares(problem, 2)
    assert taken == [(0, 2), (2, 2), (4, 1)]


def test_the_sweep_times_launches_and_groups(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("triton")

    class EachTakesTwoMicroseconds(benchmark.Timer):
        def us_per_call(self, calls: Sequence[Callable[[], Any]], *, rest: float = 0.0) -> float:
            return 2.0 + rest

    problem = benchmark.make_problem(OPTIONS, 1, 64, device="cpu")
    layer_bytes = problem.key_bytes / 2
    benchmark.sweep(problem, EachTakesTwoMicroseconds(rounds=1, bytes_per_us=layer_bytes))
    lines = capsys.readouterr().out.splitlines()
    assert sum("lists tile=" in line and " 1.000 of the floor of 2 layers" in line for line in lines) == len(
        benchmark.SELECTIONS
    )
    groups = [line.split("layers  ")[1] for line in lines if "a launch" in line]
    assert groups == [f"shares of {each} layers a launch" for each in (1, 2, 3)]


def test_the_clock_is_the_median_of_the_second_half() -> None:
    lines = ("345, 1980, 75.1", "[N/A], 1980, 75.1", "1500, 1980, 600.0", "1400, 1980, 690.5")
    said = "".join(f"{line}, 700.0\n" for line in lines)
    found = read_load(2.5, said)
    assert (found.ms, found.sm_mhz, found.max_sm_mhz) == (2.5, 1450.0, 1980.0)
    assert (found.watts, found.limit_watts) == (645.25, 700.0)
    assert read_load(2.5, "No devices were found\n") == Load(ms=2.5)
