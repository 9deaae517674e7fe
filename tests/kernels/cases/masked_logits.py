"""Cases of `masked_logits`, for a CPU, the interpreter and a GPU: odd shapes, and poison in all other rows.

X wanted rows, V vocabulary, D width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from idlm.kernels.masked_logits import Draws, Proposals, masked_logits, masked_logits_reference
from idlm.kernels.masked_logits.reference import gumbel

SHAPES = ((1, 5, 16), (7, 64, 24), (33, 300, 40), (70, 515, 72))
"""X, V, D: one row, fewer tokens than a tile, tokens after the last tile, rows and columns after theirs."""
ROUNDING = {torch.float32: 1e-6, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
"""Relative error of a logit."""
SLACK = 2e-6


def make_draws(
    num_rows: int, *, temperature: float | None = None, device: str = "cpu", seed: int = 0
) -> Draws:
    """Draws of all rows: at one temperature, or at several, 0 and a tiny one included."""
    generator = torch.Generator().manual_seed(seed)
    several_X = torch.tensor([0.0, 1.0, 0.7, 1e-9, 2.5, 1e-300], dtype=torch.float64).repeat(
        num_rows // 6 + 1
    )
    temperature_X = several_X[:num_rows].contiguous()
    if temperature is not None:
        temperature_X = torch.full((num_rows,), temperature, dtype=torch.float64)

    def words(most: int) -> Tensor:
        return torch.randint(0, most, (num_rows,), generator=generator).to(device)

    return Draws(
        temperature_X=temperature_X.to(device),
        seeds_X=words(1 << 62),
        samples_X=words(1 << 31),
        steps_X=words(1 << 40),
    )


class Case:
    """Rows (repeated and -1 ones among them) of a tensor whose other rows and columns are NaN, and a head
    with `padding` such columns, on which its alignment depends.
    """

    def __init__(
        self,
        shape: tuple[int, int, int],
        dtype: torch.dtype,
        *,
        device: str = "cpu",
        seed: int = 0,
        padding: int = 8,
    ) -> None:
        num_rows, num_tokens, width = shape
        generator = torch.Generator().manual_seed(seed)
        memory = torch.full((2 * num_rows + 3, width + 16), torch.nan, dtype=dtype)
        rows_X = torch.randperm(len(memory), generator=generator)[:num_rows]
        rows_X[num_rows // 2] = rows_X[0]
        values = torch.randn(num_rows, width, generator=generator).to(dtype)
        memory[rows_X, :width] = values
        rows_X[2:num_rows:5] = -1
        self.hidden_RD = memory.to(device)[:, :width]
        head = torch.full((num_tokens + 1, width + padding), torch.nan, dtype=dtype)
        head[:num_tokens, :width] = (3 * torch.randn(num_tokens, width, generator=generator) / width**0.5).to(
            dtype
        )
        self.weight_VD = head.to(device)[:num_tokens, :width]
        self.rows_X = rows_X.to(device)
        self.forbidden_S = torch.tensor([1, num_tokens - 1], device=device)

    def arguments(self) -> tuple[Tensor, Tensor, Tensor]:
        """What the op takes first."""
        return self.hidden_RD, self.rows_X, self.weight_VD

    def check(self, *, draws: Draws | None = None, **options: Any) -> Proposals:
        """Compare with the definition: tokens but for near ties, and numbers within twice the error of
        PyTorch's own dense product and softmax.
        """
        found = masked_logits(
            *self.arguments(), draws=draws, forbidden_S=self.forbidden_S, entropy=True, **options
        )
        expected = masked_logits_reference(
            self.hidden_RD.cpu(),
            self.rows_X.cpu(),
            self.weight_VD.cpu(),
            draws=None if draws is None else on_cpu(draws),
            forbidden_ids=self.forbidden_S.tolist(),
        )
        assert torch.equal(found.is_nonfinite_X.cpu(), expected.is_nonfinite_X)
        is_equal_X = found.token_X.cpu() == expected.token_X
        assert is_equal_X.double().mean() >= 0.9, (found.token_X, expected.token_X)
        self._check_ties(found.token_X.cpu(), is_equal_X, draws)
        allowed = self._torch_error(draws) + SLACK
        is_smooth_X = is_equal_X.clone()
        if draws is not None and self.hidden_RD.dtype != torch.float32:
            # At a tiny temperature rounding makes a tie of 1/2 each out of a certain token.
            is_smooth_X &= (draws.temperature_X.cpu() == 0) | (draws.temperature_X.cpu() > 0.5)
        for name, compares_X in (
            ("own_X", is_equal_X),
            ("confidence_X", is_smooth_X),
            ("entropy_X", is_equal_X),
        ):
            mine, true = getattr(found, name).cpu()[compares_X], getattr(expected, name)[compares_X]
            error = (mine - true).abs().max().item()
            scale = max(1.0, true.abs().max().item())
            assert error <= 2 * allowed * scale, f"{name} {error=} {allowed=}"
        is_row_X = self.rows_X.cpu() >= 0
        assert not found.token_X.cpu()[~is_row_X].any() and not found.own_X.cpu()[~is_row_X].any()
        return found

    def _check_ties(self, token_X: Tensor, is_equal_X: Tensor, draws: Draws | None) -> None:
        """Another token than the definition's is within rounding of it."""
        for place in (~is_equal_X).nonzero()[:, 0].tolist():
            logits_V = self.weight_VD.cpu().double() @ self.hidden_RD.cpu()[self.rows_X[place]].double()
            rounding = ROUNDING[self.hidden_RD.dtype] * float(logits_V.abs().max())
            logits_V[self.forbidden_S.cpu()] = -torch.inf
            keys_V = logits_V
            if draws is not None and draws.temperature_X[place] != 0:
                columns = (draws.seeds_X, draws.samples_X, draws.steps_X)
                numbers = [int(column[place]) for column in columns]
                noise_V = [gumbel(*numbers, token) for token in range(len(logits_V))]
                temperature = float(draws.temperature_X[place])
                keys_V, rounding = (
                    logits_V / temperature + torch.tensor(noise_V),
                    rounding / temperature + 1e-5,
                )
            gap = float(keys_V.max() - keys_V[token_X[place]])
            assert gap <= 2 * rounding, f"row {place}: {token_X[place]} is {gap} from the best, {rounding=}"

    def _torch_error(self, draws: Draws | None) -> float:
        """Largest error of probabilities by PyTorch's product in this dtype and softmax in fp32, relative to
        1, at temperature 1 and the largest temperature below it.
        """
        is_row_X = self.rows_X >= 0
        hidden_XD = self.hidden_RD[self.rows_X[is_row_X]]
        dense_XV = torch.nn.functional.linear(hidden_XD, self.weight_VD)
        true_XV = hidden_XD.double() @ self.weight_VD.double().T
        scale = 1.0 if draws is None else 1 / 0.7
        error_XV = (dense_XV.float() * scale).softmax(-1).double() - (true_XV * scale).softmax(-1)
        entropies = [
            torch.special.entr(one.softmax(-1).double()).sum(-1) for one in (dense_XV.float(), true_XV)
        ]
        return max(error_XV.abs().max().item(), (entropies[0] - entropies[1]).abs().max().item())


def on_cpu(draws: Draws) -> Draws:
    """The same draws on the CPU."""
    return Draws(
        temperature_X=draws.temperature_X.cpu(),
        seeds_X=draws.seeds_X.cpu(),
        samples_X=draws.samples_X.cpu(),
        steps_X=draws.steps_X.cpu(),
    )


def check_ties(device: str, dtype: torch.dtype, **options: Any) -> None:
    """Equal logits, in one tile and in several: the lowest allowed id, with half of the probability."""
    weight_VD = torch.zeros(700, 16, dtype=dtype, device=device)
    weight_VD[[3, 40, 290, 699]] = 8.0
    hidden_RD = torch.ones(1, 16, dtype=dtype, device=device)
    rows_X = torch.zeros(3, dtype=torch.int64, device=device)
    for forbidden, first in (([], 3), ([3], 40), ([3, 40], 290), ([3, 40, 290], 699)):
        forbidden_S = torch.tensor(forbidden, dtype=torch.int64, device=device) if forbidden else None
        found = masked_logits(hidden_RD, rows_X, weight_VD, forbidden_S=forbidden_S, **options)
        assert found.token_X.tolist() == [first] * 3
        torch.testing.assert_close(found.own_X.cpu(), torch.full((3,), 1 / (4 - len(forbidden))).double())


def check_nonfinite(device: str, dtype: torch.dtype, **options: Any) -> None:
    """NaN and +inf anywhere, and nothing left, are reported for their rows alone; -inf is a logit."""
    hidden_RD = torch.ones(6, 16, dtype=dtype, device=device)
    hidden_RD[1, 3], hidden_RD[2, 0], hidden_RD[3, 0], hidden_RD[4, 1] = (
        torch.nan,
        torch.inf,
        -torch.inf,
        -torch.inf,
    )
    weight_VD = torch.zeros(300, 16, dtype=dtype, device=device)
    # Column 0 makes all tokens but one +-inf or NaN; column 1 only lowers one token.
    weight_VD[:, 0], weight_VD[:, 1] = 1.0, 0.0
    weight_VD[299, 1] = 1.0
    rows_X = torch.arange(4, device=device)
    found = masked_logits(hidden_RD, rows_X, weight_VD, entropy=True, **options)
    assert found.is_nonfinite_X.tolist() == [False, True, True, True]
    assert found.token_X.tolist() == [299, 0, 0, 0] and found.own_X[1:].tolist() == [0.0] * 3
    assert found.entropy_X is not None and found.entropy_X.isfinite().all()
    everything_S = torch.arange(300, device=device)[:7]
    few = masked_logits(hidden_RD[:1], rows_X[:1], weight_VD[:7], forbidden_S=everything_S, **options)
    assert few.is_nonfinite_X.tolist() == [True]


def chi_square(num_draws: int, *, device: str = "cpu", chunk: int = 50_000, **options: Any) -> float:
    """Statistic of draws at temperature 1 from 64 tokens, of 63 degrees of freedom."""
    num_tokens, width = 64, 16
    generator = torch.Generator().manual_seed(0)
    hidden_RD = torch.randn(1, width, generator=generator).to(device)
    weight_VD = (torch.randn(num_tokens, width, generator=generator) / 4).to(device)
    counts_V = torch.zeros(num_tokens, dtype=torch.float64)
    for start in range(0, num_draws, chunk):
        steps_X = torch.arange(start, min(start + chunk, num_draws), device=device)
        same_X = torch.zeros_like(steps_X)
        draws = Draws(
            temperature_X=torch.ones(len(steps_X), dtype=torch.float64, device=device),
            seeds_X=same_X + 1234567,
            samples_X=same_X,
            steps_X=steps_X,
        )
        found = masked_logits(hidden_RD, same_X, weight_VD, draws=draws, **options)
        counts_V += found.token_X.cpu().bincount(minlength=num_tokens)
    probs_V = (weight_VD.double() @ hidden_RD[0].double()).softmax(-1).cpu()
    expected_V = num_draws * probs_V
    return float(((counts_V - expected_V) ** 2 / expected_V).sum())


CHI_SQUARE_LIMIT = 113.5
"""Exceeded with probability 1e-4 by 63 degrees of freedom."""
