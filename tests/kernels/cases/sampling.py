"""Rows of logits and settings that are hard for a sampler, and the checks of its results.

X rows, V vocabulary, B sequences, J drafts, Z lanes, Y layouts, A = J + 1."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from idlm.kernels.sampling import LayoutTables, Probs, entropy, judged_draws, nonfinite, row_probs
from tests.kernels.references.sampling import dense_probs

Settings = tuple[Tensor, Tensor, Tensor, Tensor]
Oracle = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
TEMPERATURES = (0.0, 0.05, 0.6, 1.0, 1.0, 1.7, 40.0)
ODD_TEMPERATURES = (1e-9, 1e-300, 1e30)
TOP_PS = (1.0, 1.0, 0.95, 0.5, 1e-9, 0.9999)
MIN_PS = (0.0, 0.0, 0.05, 1.0, 1e-12)
SLACK = 1e-6
VISIBLE = 1e-30
"""Probability below which a token may be kept or not: its weight is zero in fp32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Logits with the settings of each row."""

    logits_XV: Tensor
    settings: Settings

    @property
    def has_filters(self) -> bool:
        _, top_k_X, top_p_X, min_p_X = self.settings
        return bool(((top_k_X > 0) | (top_p_X < 1) | (min_p_X > 0)).any())


def make_case(
    draw: random.Random, num_rows: int, num_tokens: int, *, device: str = "cpu", filters: bool = True
) -> Case:
    """Random rows: peaked, flat, with ties, with tokens that cannot be drawn, even with a single one left."""
    generator = torch.Generator(device=device).manual_seed(draw.randrange(1 << 30))
    dtype = draw.choice([torch.float32, torch.bfloat16, torch.float16])
    logits_XV = torch.randn(num_rows, num_tokens, generator=generator, device=device)
    for row_V in logits_XV:
        row_V *= draw.choice([0.01, 1.0, 3.0, 8.0])
        row_V += draw.choice([0.0, 0.0, 20.0, -30.0])
        kind = draw.choice(["plain", "plain", "ties", "even", "holes", "one"])
        if kind == "ties":
            row_V.round_()
        elif kind == "even":
            row_V.fill_(draw.choice([0.0, -3.5]))
        elif kind == "holes" and num_tokens > 1:
            row_V[::2] = -torch.inf
        elif kind == "one":
            row_V[torch.arange(num_tokens, device=device) != draw.randrange(num_tokens)] = -torch.inf
    columns = []
    for _ in range(num_rows):
        temperature = draw.choice(TEMPERATURES if draw.random() < 0.9 else ODD_TEMPERATURES)
        # In these rows all probabilities are equal in fp64, and min_p = 1 keeps them all.
        tail = _tail(draw, filters=filters) if temperature != 1e30 else (1.0, 0.0)
        top_k = draw.choice([0, 0, 1, 5, 20, num_tokens - 1, num_tokens, 2 * num_tokens, num_tokens // 2])
        columns.append((temperature, top_k * filters, *tail))
    values = torch.tensor(columns, dtype=torch.float64, device=device).T.contiguous()
    settings = (values[0], values[1].long(), values[2], values[3])
    return Case(logits_XV=logits_XV.to(dtype), settings=settings)


def _tail(draw: random.Random, *, filters: bool) -> tuple[float, float]:
    return (draw.choice(TOP_PS), draw.choice(MIN_PS)) if filters else (1.0, 0.0)


def poisoned(logits_XV: Tensor, *, padding_rows: int) -> Tensor:
    """The same rows in the middle of NaN memory, with rows of NaN after them."""
    num_rows, num_tokens = logits_XV.shape
    memory = torch.full(
        (num_rows + padding_rows, num_tokens + 24), torch.nan, dtype=logits_XV.dtype, device=logits_XV.device
    )
    view_XV = memory[:, 8 : 8 + num_tokens]
    view_XV[:num_rows] = logits_XV
    return view_XV


def all_probs(probs: Probs, num_rows: int) -> Tensor:
    """The distribution of the first `num_rows` rows."""
    return dense_probs(probs)[:num_rows]


def check_probs(found_XV: Tensor, case: Case, oracle: Oracle) -> None:
    """Every row keeps the tokens that top_p and min_p within 1e-6 of the given ones keep, and no others.

    It keeps the first tokens by descending logit, then ascending id, in the proportions of the distribution
    without top_p and min_p. Each setting may be off separately, so no single setting need give the same set.
    """
    temperature_X, top_k_X, top_p_X, min_p_X = case.settings
    wide_XV, narrow_XV = (
        oracle(
            case.logits_XV,
            temperature_X,
            top_k_X,
            torch.where(top_p_X < 1, top_p_X * (1 + sign * SLACK), 1.0),
            min_p_X * (1 - sign * SLACK),
        )
        for sign in (1, -1)
    )
    free_XV = oracle(case.logits_XV, temperature_X, top_k_X, torch.ones_like(top_p_X), 0 * min_p_X)
    is_kept_XV = found_XV > 0
    kept_XV = free_XV.where(is_kept_XV, 0.0)
    share_XV = kept_XV / kept_XV.sum(-1, keepdim=True)
    is_right_X = ((found_XV - share_XV).abs() <= SLACK).all(-1)
    is_right_X &= ~((narrow_XV > VISIBLE) & ~is_kept_XV).any(-1)
    is_right_X &= ~((found_XV > VISIBLE) & (wide_XV <= 0)).any(-1)
    is_right_X &= _keeps_a_prefix(case.logits_XV.double(), is_kept_XV, free_XV > VISIBLE)
    rows = torch.nonzero(~is_right_X)[:, 0].tolist()
    settings = [[float(column[row]) for column in case.settings] for row in rows]
    assert not rows, f"{rows=} {settings=} {case.logits_XV.dtype=} {case.logits_XV.shape=}"


def _keeps_a_prefix(logits_XV: Tensor, is_kept_XV: Tensor, is_visible_XV: Tensor) -> Tensor:
    lowest_X1 = logits_XV.where(is_kept_XV, torch.inf).amin(-1, keepdim=True)
    is_dropped_XV = is_visible_XV & ~is_kept_XV
    ids_V = torch.arange(logits_XV.shape[1], device=logits_XV.device).double()
    is_tie_XV = logits_XV == lowest_X1
    last_kept_X = ids_V.where(is_tie_XV & is_kept_XV, -1.0).amax(-1)
    first_dropped_X = ids_V.where(is_tie_XV & is_dropped_XV, torch.inf).amin(-1)
    return ~(is_dropped_XV & (logits_XV > lowest_X1)).any(-1) & (last_kept_X < first_dropped_X)


def check_draws(token_ids_M: Tensor, probs_MV: Tensor, uniforms_M: Tensor) -> None:
    """The uniform number lies in (CDF(token - 1), CDF(token)] within 1e-6, and the token has mass."""
    ids_M1 = token_ids_M[:, None]
    upto_M = probs_MV.cumsum(-1).gather(-1, ids_M1)[:, 0]
    mass_M = probs_MV.gather(-1, ids_M1)[:, 0]
    assert (mass_M > 0).all()
    assert ((uniforms_M <= upto_M + SLACK) & (uniforms_M >= upto_M - mass_M - SLACK)).all()


def check_judged(draw: random.Random, num_rows: int, num_tokens: int, *, device: str, **options: Any) -> None:
    """Drawn or best tokens, their confidences, and entropies, with one token forbidden.

    `options`: of `row_probs`. Two rows to a sequence, the last two of them padding."""
    case = make_case(draw, num_rows, num_tokens, device=device)
    forbidden = draw.randrange(num_tokens)
    fed_XV = poisoned(case.logits_XV, padding_rows=2)
    lanes_B = torch.arange(len(fed_XV) // 2, device=device).flip(0)
    settings = tuple(torch.cat([column, column[:1]])[: len(lanes_B)] for column in case.settings)
    probs = row_probs(
        fed_XV,
        *settings,
        filters=True,
        lanes_B=lanes_B,
        forbidden_id=forbidden,
        own=True,
        **options,
    )
    allowed_XV = case.logits_XV.clone()
    allowed_XV[:, forbidden] = torch.finfo(allowed_XV.dtype).min
    assert torch.equal(fed_XV[:num_rows], allowed_XV)
    probs_XV = all_probs(probs, num_rows)
    own_XV = allowed_XV.double().softmax(-1)
    generator = torch.Generator().manual_seed(draw.randrange(1 << 30))
    uniforms_X = torch.rand(len(fed_XV), dtype=torch.float64, generator=generator).to(device)
    takes_best_X = (torch.rand(len(fed_XV), generator=generator) < 0.3).to(device)
    always_own = draw.random() < 0.3
    ids_X, confidence_X = judged_draws(
        probs,
        uniforms_X,
        settings[0],
        lanes_B=lanes_B,
        takes_best_X=takes_best_X,
        always_own=always_own,
    )
    assert ((ids_X >= 0) & (ids_X < num_tokens)).all()
    ids_X, is_best_X = ids_X[:num_rows], takes_best_X[:num_rows]
    assert torch.equal(ids_X[is_best_X], allowed_XV.argmax(-1)[is_best_X])
    check_draws(ids_X[~is_best_X], probs_XV[~is_best_X], uniforms_X[:num_rows][~is_best_X])
    greedy_X = (settings[0] == 0)[lanes_B].repeat_interleave(2)[:num_rows]
    judge_XV = torch.where((greedy_X | always_own)[:, None], own_XV, probs_XV)
    expected_X = judge_XV.gather(1, ids_X[:, None])[:, 0]
    torch.testing.assert_close(confidence_X[:num_rows], expected_X, atol=SLACK, rtol=SLACK)
    entropy_X = torch.special.entr(own_XV).sum(-1)
    torch.testing.assert_close(entropy(probs)[:num_rows], entropy_X, atol=1e-5, rtol=1e-5)


def check_nonfinite(
    draw: random.Random, num_rows: int, num_tokens: int, *, device: str, **options: Any
) -> None:
    """Rows with a NaN or infinite logit, or with -inf alone, are reported; other rows do not change."""
    case = make_case(draw, num_rows, num_tokens, device=device)
    settings, logits_XV = case.settings, case.logits_XV
    before_XV = dense_probs(row_probs(logits_XV, *settings, filters=True, **options))
    has_probs_X = torch.ones(num_rows, dtype=torch.bool, device=device)
    for row, row_V in enumerate(logits_XV):
        kind = draw.choice(["whole", "whole", "nan", "nans", "overflow", "nothing"])
        has_probs_X[row] = kind == "whole"
        if kind in ("nan", "overflow"):
            row_V[draw.randrange(num_tokens)] = torch.nan if kind == "nan" else torch.inf
        elif kind != "whole":
            row_V.fill_(torch.nan if kind == "nans" else -torch.inf)
    probs = row_probs(logits_XV, *settings, filters=case.has_filters, **options)
    after_XV = dense_probs(probs)
    assert torch.equal(after_XV[has_probs_X], before_XV[has_probs_X])
    rows_BJ = torch.tensor([[draw.randrange(-1, num_rows) for _ in range(3)] for _ in range(40)]).to(device)
    for rows in (rows_BJ, rows_BJ[:, 1:], rows_BJ[:, :1]):
        expected = [
            next((index for index, row in enumerate(own, 1) if row >= 0 and not has_probs_X[row]), 0)
            for own in rows.tolist()
        ]
        assert nonfinite(probs, rows).tolist() == expected


def random_tables(draw: random.Random, num_masks: int, width: int, *, device: str = "cpu") -> LayoutTables:
    """Layout 0 has no drafts, 1 has all, 2 some, with any rows for the next ones, rarely none."""
    num_layouts = 3 if num_masks else 1
    drafts = [0, num_masks, draw.randint(min(1, num_masks), num_masks)][:num_layouts]
    rows = [
        [[draw.choice([*range(width)] * 3 + [-1]) for _ in range(num_masks)] for _ in range(num_masks + 1)]
        for _ in range(num_layouts)
    ]
    layouts = [
        [draw.choice([1, 2]) * (num_masks > 0) for _ in range(num_masks + 1)] for _ in range(num_layouts)
    ]
    return LayoutTables(
        num_drafts_Y=torch.tensor(drafts, device=device),
        draft_rows_YAJ=torch.tensor(rows, dtype=torch.int64, device=device).view(
            num_layouts, num_masks + 1, num_masks
        ),
        next_layouts_YA=torch.tensor(layouts, device=device),
    )
