"""Rows of logits and settings that are hard on a sampler, and the checks of what it makes of them.

X rows, V vocabulary, B sequences, J drafts, Z lanes, Y layouts, A = J + 1.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from idlm.kernels.sampling import Laws, LayoutTables, probability

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
        # There, fp64 has no probabilities but the largest, and min_p = 1 keeps them all.
        tail = _tail(draw, filters=filters) if temperature != 1e30 else (1.0, 0.0)
        top_k = draw.choice([0, 0, 1, 5, 20, num_tokens - 1, num_tokens, 2 * num_tokens, num_tokens // 2])
        columns.append((temperature, top_k * filters, *tail))
    values = torch.tensor(columns, dtype=torch.float64, device=device).T.contiguous()
    settings = (values[0], values[1].long(), values[2], values[3])
    return Case(logits_XV=logits_XV.to(dtype), settings=settings)


def _tail(draw: random.Random, *, filters: bool) -> tuple[float, float]:
    return (draw.choice(TOP_PS), draw.choice(MIN_PS)) if filters else (1.0, 0.0)


def poisoned(logits_XV: Tensor, *, padding_rows: int) -> Tensor:
    """The same rows in the middle of NaN memory, with rows of NaN behind them."""
    num_rows, num_tokens = logits_XV.shape
    memory = torch.full(
        (num_rows + padding_rows, num_tokens + 24), torch.nan, dtype=logits_XV.dtype, device=logits_XV.device
    )
    view_XV = memory[:, 8 : 8 + num_tokens]
    view_XV[:num_rows] = logits_XV
    return view_XV


def whole_law(laws: Laws, num_rows: int, num_tokens: int, device: str = "cpu") -> Tensor:
    """The law [X, V] that `probability` answers with."""
    ids_XV = torch.arange(num_tokens, device=device).expand(num_rows, -1)
    rows_XV = torch.arange(num_rows, device=device)[:, None].expand(-1, num_tokens)
    return probability(laws, rows_XV, ids_XV)


def check_laws(found_XV: Tensor, case: Case, oracle: Oracle) -> None:
    """Every row keeps all that top_p and min_p keep within 1e-6 of those given, and nothing more than that.

    What it keeps is what comes first by falling logit, then rising id, in the proportions of the law without
    top_p and min_p. Each may be off by less than its neighbours, so no single setting need give the same set.
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
    told = [[float(column[row]) for column in case.settings] for row in rows]
    assert not rows, f"{rows=} {told=} {case.logits_XV.dtype=} {case.logits_XV.shape=}"


def _keeps_a_prefix(logits_XV: Tensor, is_kept_XV: Tensor, is_visible_XV: Tensor) -> Tensor:
    lowest_X1 = logits_XV.where(is_kept_XV, torch.inf).amin(-1, keepdim=True)
    is_dropped_XV = is_visible_XV & ~is_kept_XV
    ids_V = torch.arange(logits_XV.shape[1], device=logits_XV.device).double()
    is_tie_XV = logits_XV == lowest_X1
    last_kept_X = ids_V.where(is_tie_XV & is_kept_XV, -1.0).amax(-1)
    first_dropped_X = ids_V.where(is_tie_XV & is_dropped_XV, torch.inf).amin(-1)
    return ~(is_dropped_XV & (logits_XV > lowest_X1)).any(-1) & (last_kept_X < first_dropped_X)


def check_draws(token_ids_M: Tensor, law_MV: Tensor, uniforms_M: Tensor) -> None:
    """The uniform number lies in (CDF(token - 1), CDF(token)] within 1e-6, and the token has mass."""
    ids_M1 = token_ids_M[:, None]
    upto_M = law_MV.cumsum(-1).gather(-1, ids_M1)[:, 0]
    mass_M = law_MV.gather(-1, ids_M1)[:, 0]
    assert (mass_M > 0).all()
    assert ((uniforms_M <= upto_M + SLACK) & (uniforms_M >= upto_M - mass_M - SLACK)).all()


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
