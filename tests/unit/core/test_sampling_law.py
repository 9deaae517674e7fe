"""The emitted law by exact enumeration over all pairs; warps against slow references."""

from __future__ import annotations

import itertools

import pytest
import torch

from idlm.acceptance import (
    acceptance_rate,
    emitted_probs,
    residual,
    tokens_per_forward_branch,
    tokens_per_forward_cold,
)
from idlm.sampling import Warp, draw, to_probs

SETTINGS = list(itertools.product((0.0, 0.3, 1.0, 1.7), (0, 1, 3, 6), (1.0, 0.9, 0.4), (0.0, 0.2)))
PAIRS_PER_SETTING = 10_000


def _warp(num_rows: int, temperature: float, top_k: int, top_p: float, min_p: float) -> Warp:
    def column(value: float) -> torch.Tensor:
        return torch.full((num_rows,), value, dtype=torch.float64)

    return Warp(
        temperature_X=column(temperature),
        top_k_X=torch.full((num_rows,), top_k),
        top_p_X=column(top_p),
        min_p_X=column(min_p),
    )


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
    """96 settings x 10,000 random (p, q) pairs: total variation from p at most 1e-6 (in fact 1e-15)."""
    generator = torch.Generator().manual_seed(hash((temperature, top_k, top_p, min_p)) % 2**31)
    spread = torch.rand(PAIRS_PER_SETTING, 1, generator=generator) * 4
    logits_p = torch.randn(PAIRS_PER_SETTING, 9, generator=generator) * spread
    logits_q = logits_p + torch.randn(PAIRS_PER_SETTING, 9, generator=generator) * torch.rand(
        1, generator=generator
    )
    warp = _warp(PAIRS_PER_SETTING, temperature, top_k, top_p, min_p)
    p, q = to_probs(logits_p, warp), to_probs(logits_q, warp)
    assert (emitted_probs(p, q) - p).abs().sum(-1).max() / 2 <= 1e-6
    for row in range(0, PAIRS_PER_SETTING, 1009):
        slow = _slow_law(logits_p[row].tolist(), temperature, top_k, top_p, min_p)
        assert p[row].tolist() == pytest.approx(slow, abs=1e-9)


def test_emitted_law_of_the_published_rule_is_biased() -> None:
    """Power of the test above: an argmax draft tested with the softmax q is far from p."""
    p = torch.randn(100, 9, generator=torch.Generator().manual_seed(0)).double().softmax(-1)
    best = p.argmax(-1, keepdim=True)
    accept = (p / p).gather(-1, best)
    published = torch.zeros_like(p).scatter(-1, best, accept)
    assert ((published - p).abs().sum(-1) / 2).mean() > 0.3


def test_relaxed_acceptance_is_lossy_and_grows_with_tau() -> None:
    generator = torch.Generator().manual_seed(1)
    p, q = (torch.randn(50, 9, generator=generator).double().softmax(-1) for _ in range(2))
    distance = [float((emitted_probs(p, q, tau) - p).abs().sum(-1).mean() / 2) for tau in (0.0, 0.2, 1.0)]
    assert distance[0] < 1e-12 < distance[1] < distance[2]


def test_residual_and_acceptance_rate() -> None:
    p, q = torch.tensor([[0.5, 0.5, 0.0]]).double(), torch.tensor([[0.2, 0.3, 0.5]]).double()
    assert residual(p, q).tolist() == [pytest.approx([0.6, 0.4, 0.0])]
    assert residual(p, p).tolist() == p.tolist()
    assert float(acceptance_rate(p, q)) == pytest.approx(0.5)


def test_draw_follows_the_law_and_never_leaves_its_support() -> None:
    law = torch.tensor([0.0, 0.25, 0.0, 0.5, 0.25, 0.0]).double()
    edges = torch.tensor(
        [2.0**-33, 0.2499999, 0.25, 0.2500001, 0.7499999, 0.75, 1 - 2.0**-33], dtype=torch.float64
    )
    assert draw(law.expand(len(edges), -1), edges).tolist() == [1, 1, 3, 3, 3, 4, 4]
    grid = (torch.arange(4000).double() + 0.5) / 4000
    counts = draw(law.expand(4000, -1), grid).bincount(minlength=6)
    assert counts.tolist() == [0, 1000, 0, 2000, 1000, 0]


def test_rows_keep_their_own_settings() -> None:
    logits = torch.randn(5, generator=torch.Generator().manual_seed(3)).expand(3, 5)
    warp = Warp(
        temperature_X=torch.tensor([0.0, 1.0, 2.0]).double(),
        top_k_X=torch.tensor([0, 2, 0]),
        top_p_X=torch.tensor([1.0, 1.0, 0.5]).double(),
        min_p_X=torch.zeros(3).double(),
    )
    law = to_probs(logits, warp)
    assert (law[0] > 0).sum() == 1
    assert (law[1] > 0).sum() == 2
    assert law[2].tolist() == pytest.approx(_slow_law(logits[2].tolist(), 2.0, 0, 0.5, 0.0))
    assert torch.equal(to_probs(logits[:2], warp.rows(torch.tensor([2, 0]))), law[[2, 0]])


@pytest.mark.parametrize("acceptance", [0.0, 0.5, 0.85, 0.9, 1.0])
def test_tokens_per_forward_formulas(acceptance: float) -> None:
    """Against a Markov chain of passes, enumerated."""
    per_position = [acceptance] * 3
    reach = [acceptance**k for k in range(4)]
    verify = sum(reach)
    rejects = 1 - reach[3]
    cold = (verify + rejects * 1) / (1 + rejects)
    assert tokens_per_forward_cold(per_position) == pytest.approx(cold)
    assert tokens_per_forward_branch(per_position) == pytest.approx(verify)
    if acceptance == 0.9:
        assert tokens_per_forward_cold(per_position) == pytest.approx(2.92, abs=0.005)
    assert tokens_per_forward_cold([]) == tokens_per_forward_branch([]) == 1.0
