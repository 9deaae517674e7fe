"""The emitted distribution by exact enumeration over all pairs, with the distributions that a CPU samples
from."""

from __future__ import annotations

import itertools

import pytest
import torch

from idlm.kernels.sampling.probs import plain_row_probs
from tests.kernels.references.sampling import emitted_reference

Settings = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]

SETTINGS = list(itertools.product((0.0, 0.3, 1.0, 1.7), (0, 1, 3, 6), (1.0, 0.9, 0.4), (0.0, 0.2)))
PAIRS_PER_SETTING = 2_000


def _settings(num_rows: int, temperature: float, top_k: int, top_p: float, min_p: float) -> Settings:
    def column(value: float) -> torch.Tensor:
        return torch.full((num_rows,), value, dtype=torch.float64)

    return column(temperature), torch.full((num_rows,), top_k), column(top_p), column(min_p)


def _probs(logits_XV: torch.Tensor, settings: Settings) -> torch.Tensor:
    return plain_row_probs(logits_XV.double(), settings, None, filters=True).probs_XV


def _slow_law(logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float) -> list[float]:
    """One row, in plain Python, straight from the definition."""
    if temperature == 0:
        best = max(range(len(logits)), key=lambda token: (logits[token], -token))
        return [float(token == best) for token in range(len(logits))]
    scaled = [value / temperature for value in logits]
    if top_k:
        kth = sorted(scaled, reverse=True)[min(top_k, len(scaled)) - 1]
        scaled = [value if value >= kth else -float("inf") for value in scaled]
    weights = torch.tensor(scaled, dtype=torch.float64).softmax(0).tolist()
    if top_p < 1:
        mass, kept = 0.0, set()
        for token in sorted(range(len(weights)), key=lambda token: (-weights[token], token)):
            if mass >= top_p and kept:
                break
            kept.add(token)
            mass += weights[token]
        weights = [weight if token in kept else 0.0 for token, weight in enumerate(weights)]
    floor = min_p * max(weights)
    weights = [weight if weight >= floor else 0.0 for weight in weights]
    return [weight / sum(weights) for weight in weights]


@pytest.mark.parametrize(("temperature", "top_k", "top_p", "min_p"), SETTINGS)
def test_emitted_law_is_p_for_every_setting(
    temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    """Random (p, q) pairs: total variation from p at most 1e-6 (in fact 1e-15)."""
    generator = torch.Generator().manual_seed(hash((temperature, top_k, top_p, min_p)) % 2**31)
    spread = torch.rand(PAIRS_PER_SETTING, 1, generator=generator) * 4
    logits_p = torch.randn(PAIRS_PER_SETTING, 9, generator=generator) * spread
    logits_q = logits_p + torch.randn(PAIRS_PER_SETTING, 9, generator=generator) * torch.rand(
        1, generator=generator
    )
    settings = _settings(PAIRS_PER_SETTING, temperature, top_k, top_p, min_p)
    p, q = _probs(logits_p, settings), _probs(logits_q, settings)
    assert (emitted_reference(p, q) - p).abs().sum(-1).max() / 2 <= 1e-6
    for row in range(0, PAIRS_PER_SETTING, 199):
        slow = _slow_law(logits_p[row].tolist(), temperature, top_k, top_p, min_p)
        assert p[row].tolist() == pytest.approx(slow, abs=1e-9)
