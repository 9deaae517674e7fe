"""Cases of `masked_logits`, for the interpreter and a GPU: odd shapes, and poison in all other rows.

X wanted rows, V vocabulary, D width."""

from __future__ import annotations

import torch
from torch import Tensor

from idlm.kernels.masked_logits import Proposals, masked_logits
from tests.kernels.references.masked_logits import masked_logits_reference

SHAPES = ((1, 5, 16), (7, 64, 24), (33, 300, 40), (70, 515, 72))
"""X, V, D: one row, fewer tokens than a tile, tokens after the last tile, rows and columns after theirs."""
ROUNDING = {torch.float32: 1e-6, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
"""Relative error of a logit."""
SLACK = 2e-6
HUGE = 6e4


class Case:
    """Rows (repeated and -1 ones among them) of a tensor whose other rows and columns are NaN, and a head
    with `padding` columns, on which its alignment depends. They are `HUGE`: libraries multiply what follows a
    row by zero."""

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
        head = torch.full((num_tokens + 1, width + padding), HUGE, dtype=dtype)
        head[:num_tokens, :width] = (3 * torch.randn(num_tokens, width, generator=generator) / width**0.5).to(
            dtype
        )
        self.weight_VD = head.to(device)[:num_tokens, :width]
        self.rows_X = rows_X.to(device)
        self.forbidden_S = torch.tensor([1, num_tokens - 1], device=device)

    def arguments(self) -> tuple[Tensor, Tensor, Tensor]:
        """What the op takes first."""
        return self.hidden_RD, self.rows_X, self.weight_VD

    def check(self) -> Proposals:
        """Compare with the definition: tokens but for near ties, and numbers within twice the error of
        PyTorch's own dense product and softmax."""
        found = masked_logits(*self.arguments(), forbidden_S=self.forbidden_S, entropy=True)
        expected = masked_logits_reference(
            self.hidden_RD.cpu(),
            self.rows_X.cpu(),
            self.weight_VD.cpu(),
            forbidden_ids=self.forbidden_S.tolist(),
        )
        assert torch.equal(found.is_nonfinite_X.cpu(), expected.is_nonfinite_X)
        is_equal_X = found.token_X.cpu() == expected.token_X
        assert is_equal_X.double().mean() >= 0.9, (found.token_X, expected.token_X)
        self._check_ties(found.token_X.cpu(), is_equal_X)
        allowed = self._torch_error() + SLACK
        for name in ("own_X", "entropy_X"):
            mine, true = getattr(found, name).cpu()[is_equal_X], getattr(expected, name)[is_equal_X]
            error = (mine - true).abs().max().item()
            scale = max(1.0, true.abs().max().item())
            assert error <= 2 * allowed * scale, f"{name} {error=} {allowed=}"
        is_row_X = self.rows_X.cpu() >= 0
        assert not found.token_X.cpu()[~is_row_X].any() and not found.own_X.cpu()[~is_row_X].any()
        return found

    def _check_ties(self, token_X: Tensor, is_equal_X: Tensor) -> None:
        """Another token than the definition's is within rounding of it."""
        for index in (~is_equal_X).nonzero()[:, 0].tolist():
            logits_V = self.weight_VD.cpu().double() @ self.hidden_RD.cpu()[self.rows_X[index]].double()
            rounding = ROUNDING[self.hidden_RD.dtype] * float(logits_V.abs().max())
            logits_V[self.forbidden_S.cpu()] = -torch.inf
            gap = float(logits_V.max() - logits_V[token_X[index]])
            assert gap <= 2 * rounding, f"row {index}: {token_X[index]} is {gap} from the best, {rounding=}"

    def _torch_error(self) -> float:
        """Largest error of probabilities and entropies by PyTorch's product in this dtype and softmax in
        fp32."""
        is_row_X = self.rows_X >= 0
        hidden_XD = self.hidden_RD[self.rows_X[is_row_X]]
        dense_XV = torch.nn.functional.linear(hidden_XD, self.weight_VD)
        true_XV = hidden_XD.double() @ self.weight_VD.double().T
        error_XV = dense_XV.float().softmax(-1).double() - true_XV.softmax(-1)
        entropies = [
            torch.special.entr(one.softmax(-1).double()).sum(-1) for one in (dense_XV.float(), true_XV)
        ]
        return max(error_XV.abs().max().item(), (entropies[0] - entropies[1]).abs().max().item())


def check_ties(device: str, dtype: torch.dtype) -> None:
    """Equal logits, in one tile and in several: the lowest allowed id, with half of the probability."""
    weight_VD = torch.zeros(700, 16, dtype=dtype, device=device)
    weight_VD[[3, 40, 290, 699]] = 8.0
    hidden_RD = torch.ones(1, 16, dtype=dtype, device=device)
    rows_X = torch.zeros(3, dtype=torch.int64, device=device)
    for forbidden, first in (([], 3), ([3], 40), ([3, 40], 290), ([3, 40, 290], 699)):
        forbidden_S = torch.tensor(forbidden, dtype=torch.int64, device=device) if forbidden else None
        found = masked_logits(hidden_RD, rows_X, weight_VD, forbidden_S=forbidden_S)
        assert found.token_X.tolist() == [first] * 3
        torch.testing.assert_close(found.own_X.cpu(), torch.full((3,), 1 / (4 - len(forbidden))).double())


def check_nonfinite(device: str, dtype: torch.dtype) -> None:
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
    found = masked_logits(hidden_RD, rows_X, weight_VD, entropy=True)
    assert found.is_nonfinite_X.tolist() == [False, True, True, True]
    assert found.token_X.tolist() == [299, 0, 0, 0] and found.own_X[1:].tolist() == [0.0] * 3
    assert found.entropy_X is not None and found.entropy_X.isfinite().all()
    everything_S = torch.arange(300, device=device)[:7]
    few = masked_logits(hidden_RD[:1], rows_X[:1], weight_VD[:7], forbidden_S=everything_S)
    assert few.is_nonfinite_X.tolist() == [True]
