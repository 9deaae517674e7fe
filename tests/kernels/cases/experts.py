"""Random checks of routing and experts against fp64, with NaN in all memory that must not be read.

Run in the interpreter by interpreted_experts.py (fp32, fp16) and on a GPU by
tests/gpu/block/test_experts_gpu.py. R rows, X experts that rows choose from, E experts that are here, C
chosen experts, D width, F ffn."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from idlm.kernels.experts import Routing, experts, route
from idlm.kernels.experts.launch import ExpertsLaunch
from tests.kernels.cases.trunk import NAN, assert_close
from tests.kernels.references.experts import route_reference

MARGIN = 1e-5
"""fp32 may choose either of two scores that are closer than this."""
MAX_WEIGHT_SHARE = {torch.bfloat16: 2**-8, torch.float16: 2**-10, torch.float32: 2e-6}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Values that cases are drawn from. Compile-time sizes vary together, or a GPU would spend its time on
    compiling: routers are (X, chosen, groups, chosen groups, score), experts (width, ffn)."""

    rows: tuple[int, ...]
    routers: tuple[tuple[int, int, int, int, Literal["softmax", "sigmoid"]], ...]
    experts: tuple[tuple[int, int], ...]
    max_numbers: int = 1 << 25
    """Maximum size of a stack of weights; larger draws take the first of `experts`."""


SMALL = Sizes(
    rows=(1, 2, 6),
    routers=((7, 3, 1, 1, "softmax"), (12, 3, 4, 2, "sigmoid"), (8, 1, 2, 2, "softmax")),
    experts=((16, 16), (40, 20)),
)
LARGE = Sizes(
    rows=(1, 2, 3, 17, 64, 65, 300),
    routers=(
        (7, 1, 1, 1, "softmax"),
        (128, 8, 1, 1, "softmax"),
        (256, 8, 8, 4, "sigmoid"),
        (12, 3, 4, 2, "sigmoid"),
        (30, 4, 5, 3, "softmax"),
    ),
    experts=((96, 48), (100, 20), (520, 200), (2048, 768), (512, 256)),
)


class Case:
    """One draw of everything; the last row is padding and holds NaN."""

    def __init__(self, seed: int, device: str, dtype: torch.dtype, sizes: Sizes) -> None:
        rng = self.rng = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self._device_generator = torch.Generator(device).manual_seed(seed)
        self.device, self.dtype = device, dtype
        self.num_rows = rng.choice(sizes.rows) + 1
        self.num_experts, num_chosen, groups, chosen_groups, score = rng.choice(sizes.routers)
        self.routing = Routing(
            num_chosen=num_chosen,
            score=score,
            is_normalised=num_chosen > 1,
            scaling=rng.choice((1.0, 2.5)),
            num_groups=groups,
            num_chosen_groups=chosen_groups,
        )
        self.width, self.ffn = rng.choice(sizes.experts)
        if 2 * self.num_experts * self.width * self.ffn > sizes.max_numbers:
            self.width, self.ffn = sizes.experts[0]

    def tensor(self, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        drawn = torch.randn(shape, generator=self._device_generator, device=self.device)
        return (scale * drawn).to(dtype or self.dtype)

    def rows(self, width: int) -> Tensor:
        """Rows with memory of NaN around them."""
        memory = torch.full((self.num_rows + 2, width + 8), NAN, device=self.device, dtype=self.dtype)
        rows = memory[1:-1, :width]
        rows[:-1] = self.tensor(self.num_rows - 1, width)
        return rows

    def slots(self) -> Tensor:
        slots_R = torch.arange(self.num_rows, device=self.device)
        slots_R[-1] = -1
        return slots_R


def check_route(case: Case) -> None:
    """Choices are ascending, distinct and correct; a lone row gets the bits of a row among others."""
    routing, num_experts = case.routing, case.num_experts
    logits_RX = case.rows(num_experts)
    bias_X = None
    if routing.score == "sigmoid":
        bias_X = case.tensor(num_experts, scale=0.2, dtype=torch.float32)
    found_RC, weights_RC = route(logits_RX, routing, bias_X=bias_X, slots_R=case.slots())
    assert (found_RC[-1] == -1).all()
    alone = route(logits_RX[:1], routing, bias_X=bias_X)
    assert torch.equal(alone[0], found_RC[:1]) and torch.equal(alone[1], weights_RC[:1])
    real = logits_RX[:-1].double().cpu()
    bias = None if bias_X is None else bias_X.double().cpu()
    chosen, weights = route_reference(real, routing, bias_E=bias)
    num_clear = 0
    for row, logits_X in enumerate(real):
        if not _is_clear(logits_X, routing, bias):
            continue
        num_clear += 1
        assert sorted(found_RC[row].tolist()) == chosen[row], f"{row=} {routing=}"
        order = found_RC[row].long().argsort()
        error = (weights_RC[row].cpu().double()[order.cpu()] - torch.tensor(weights[row]).double()).abs()
        assert (error <= MAX_WEIGHT_SHARE[case.dtype] * routing.scaling + 1e-6).all(), f"{row=} {routing=}"
    assert num_clear >= 0.5 * len(real) or len(real) < 10, "nearly all draws are ties: nothing was compared"


BLOCK_ROUTERS: tuple[tuple[int, int, int, int, Literal["softmax", "sigmoid"]], ...] = (
    (7, 2, 3, 4, "sigmoid"),
    (256, 8, 48, 32, "sigmoid"),
    (12, 3, 3, 5, "softmax"),
    (16, 4, 16, 8, "sigmoid"),
    (100, 1, 9, 1, "sigmoid"),
)
"""(X, chosen, capacity, block size, score)."""


def check_block_route(
    seed: int, device: str, dtype: torch.dtype, *, max_blocks: int, max_experts: int = 256
) -> None:
    """Blocks of several sequences, of which the last may be short, then padding that holds NaN: choices are
    those of the reference, and a block alone gets the bits that it gets among others."""
    rng, routers = random.Random(seed), [one for one in BLOCK_ROUTERS if one[0] <= max_experts]
    num_experts, num_chosen, capacity, size, score = rng.choice(routers)
    limits = {"num_chosen": num_chosen, "capacity": capacity, "block_size": size}
    routing = Routing(score=score, is_normalised=True, scaling=2.5, **limits)
    positions, blocks, spans = [], [], []
    for number in range(rng.randint(1, max_blocks)):
        # A block that starts a sequence may have the position of the one before.
        start = size * rng.randint(0, 3)
        length = size if rng.random() < 0.7 else rng.randint(1, size)
        spans.append((len(positions), len(positions) + length))
        positions += range(start, start + length)
        blocks += [number] * length
    num_rows, num_padding = len(positions), rng.randint(0, 3)
    generator = torch.Generator().manual_seed(seed)
    memory = torch.full((num_rows + num_padding + 2, num_experts + 8), NAN, dtype=dtype)
    logits_RX = memory[1:-1, :num_experts]
    logits_RX[:num_rows] = torch.randn(num_rows, num_experts, generator=generator).to(dtype)
    bias_X = 0.2 * torch.randn(num_experts, generator=generator) if score == "sigmoid" else None
    positions_R = torch.tensor(positions + [0] * num_padding)
    slots_R = torch.tensor([*range(num_rows), *[-1] * num_padding])
    given = (memory.to(device)[1:-1, :num_experts], positions_R.to(device), slots_R.to(device))
    there = None if bias_X is None else bias_X.to(device)

    def chosen_in(rows: slice) -> tuple[Tensor, Tensor]:
        logits, positions, slots = (one[rows] for one in given)
        found = route(logits, routing, bias_X=there, slots_R=slots, positions_R=positions)
        assert (found[0][slots < 0] == -1).all()
        return found[0].cpu(), found[1].cpu()

    found_RC, weights_RC = chosen_in(slice(None))
    wide, bias = logits_RX[:num_rows].double(), None if bias_X is None else bias_X.double()
    chosen, weights = route_reference(wide, routing, bias_E=bias, blocks=blocks)
    quality_RX = wide.softmax(1) if bias is None else wide.sigmoid() + bias
    num_clear = 0
    for start, stop in spans:
        alone_RC, alone_weights_RC = chosen_in(slice(start, stop))
        assert torch.equal(alone_RC, found_RC[start:stop])
        assert torch.equal(alone_weights_RC, weights_RC[start:stop])
        best_X, order_X = quality_RX[start:stop].amax(0).sort(descending=True)
        if capacity < num_experts and best_X[capacity - 1] - best_X[capacity] < MARGIN:
            continue
        for row in range(start, stop):
            ranked_X = quality_RX[row, order_X[:capacity]].sort(descending=True).values
            if num_chosen < capacity and ranked_X[num_chosen - 1] - ranked_X[num_chosen] < MARGIN:
                continue
            num_clear += 1
            order = found_RC[row].long().argsort()
            assert found_RC[row][order].tolist() == chosen[row], f"{seed=} {row=} {routing=}"
            error = (weights_RC[row].double()[order] - torch.tensor(weights[row]).double()).abs()
            assert (error <= MAX_WEIGHT_SHARE[dtype] * routing.scaling + 1e-6).all(), f"{seed=} {row=}"
    assert num_clear >= 0.5 * num_rows or num_rows < 10, "nearly all draws are ties: nothing was compared"


def _is_clear(logits_X: Tensor, routing: Routing, bias_X: Tensor | None) -> bool:
    """Whether the chosen scores exceed the others by more than errors of fp32."""
    quality_X = logits_X.softmax(0) if routing.score == "softmax" else logits_X.sigmoid()
    quality_X = quality_X if bias_X is None else quality_X + bias_X
    grouped_Gx = quality_X.view(routing.num_groups, -1)
    if routing.num_chosen_groups < routing.num_groups:
        sums_G = grouped_Gx.topk(2, dim=1).values.sum(1)
        ranked_G, order_G = sums_G.sort(descending=True)
        if ranked_G[routing.num_chosen_groups - 1] - ranked_G[routing.num_chosen_groups] < MARGIN:
            return False
        grouped_Gx = grouped_Gx[order_G[: routing.num_chosen_groups]]
    ranked_X = grouped_Gx.flatten().sort(descending=True).values
    last = routing.num_chosen
    return last == len(ranked_X) or bool(ranked_X[last - 1] - ranked_X[last] >= MARGIN)


def chosen_of(case: Case) -> tuple[Tensor, Tensor]:
    """Distinct experts of each row, few of them popular, and weights; padding chooses -1."""
    popularity = torch.rand(case.num_experts, generator=case.generator) ** 4 + 1e-3
    experts_RC = torch.multinomial(
        popularity.expand(case.num_rows, -1), case.routing.num_chosen, generator=case.generator
    )
    experts_RC[-1] = -1
    weights_RC = torch.rand(experts_RC.shape, generator=case.generator)
    weights_RC[-1] = NAN
    return experts_RC.to(case.device), weights_RC.to(case.device)


def check_experts(case: Case, launch: ExpertsLaunch | None = None) -> None:
    """At most twice the error of the plain path in the same dtype; experts that no row chose hold NaN."""
    x_RD, (experts_RC, weights_RC) = case.rows(case.width), chosen_of(case)
    first = case.rng.choice((0, 0, case.num_experts // 2))
    here = case.num_experts - first
    gate_up_EFD = case.tensor(here, 2 * case.ffn, case.width, scale=case.width**-0.5)
    down_EDF = case.tensor(here, case.width, case.ffn, scale=case.ffn**-0.5)
    is_unused_E = torch.ones(case.num_experts, dtype=torch.bool)
    is_unused_E[experts_RC[:-1].flatten().cpu()] = False
    for weight in (gate_up_EFD, down_EDF):
        weight[is_unused_E[first:].to(case.device)] = NAN
    shared_RD = case.rows(case.width) if case.rng.random() < 0.5 else None
    given = (x_RD, gate_up_EFD, down_EDF, experts_RC, weights_RC)
    options = {"first": first, "num_choices": case.num_experts, "shared_RD": shared_RD}
    found_RD = experts(*given, **options, launch=launch)
    what = f"{case.num_rows=} {case.num_experts=} {case.routing=} {case.width=} {case.ffn=} {first=}"
    assert not found_RD[-1].any(), what
    wide = tuple(one.double() for one in (x_RD, gate_up_EFD, down_EDF))
    wide_shared = None if shared_RD is None else shared_RD.double()
    true_RD = experts(*wide, experts_RC, weights_RC.double(), first=first, shared_RD=wide_shared)
    assert_close(found_RD, plainly(given, first, shared_RD), true_RD, what)
    few = None if shared_RD is None else shared_RD[:1]
    alone = experts(x_RD[:1], *given[1:3], experts_RC[:1], weights_RC[:1], **{**options, "shared_RD": few})
    if case.device == "cuda":
        assert torch.equal(alone, found_RD[:1]), f"the number of rows changed a row: {what}"
    torch.testing.assert_close(alone.double(), true_RD[:1], atol=2e-2, rtol=2e-2)


def plainly(given: tuple[Tensor, ...], first: int, shared_RD: Tensor | None) -> Tensor:
    """The plain path on any device."""
    from idlm.kernels.experts.op import plain_experts

    x_RD, gate_up_EFD, down_EDF, experts_RC, weights_RC = given
    return plain_experts(x_RD, (gate_up_EFD, down_EDF), (experts_RC, weights_RC), first, shared_RD)
