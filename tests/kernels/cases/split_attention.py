"""Random packed rows for the tests of split attention, and their common check."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from idlm.kernels.split_attention import (
    Visibility,
    split_attention_ranges,
    split_attention_reference,
    visibility,
)
from idlm.masks import RowMeta
from idlm.train.data.layout import Sample, SampleRows, clean_rows, noisy_rows, pack_rows
from idlm.train.objectives.base import OBJECTIVES
from idlm.train.objectives.curriculum import Stage

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One random problem; `lengths`: (prompt, response) tokens of the documents of each packed row."""

    lengths: tuple[tuple[tuple[int, int], ...], ...]
    stride: int
    padding: int
    mask_region: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    seed: int
    objective: str = "idlm"
    """`idlm`: causal blocks of `stride - 1` masks. `block`: blocks of `stride` that see themselves both ways.
    `full`: documents without clean rows, all of whose rows see each other."""


def random_case(seed: int, *, longest: int, head_dims: tuple[int, ...] = (16,)) -> Case:
    """Strides, packings, paddings and head shapes drawn from `seed`."""
    rng = np.random.default_rng(seed)
    return Case(
        lengths=tuple(
            tuple(
                (int(rng.integers(0, longest)), int(rng.integers(2, longest)))
                for _ in range(rng.integers(1, 5))
            )
            for _ in range(rng.integers(1, 3))
        ),
        stride=(2, 3, 4, 16, 6)[seed % 5],
        padding=int(rng.integers(0, longest)),
        mask_region=("response", "all")[seed // 5 % 2],
        num_heads=2 * (4, 1, 2)[seed % 3],
        num_kv_heads=2,
        head_dim=head_dims[seed % len(head_dims)],
        seed=seed,
        objective=("idlm", "block", "full")[(seed + seed // 3) % 3],
    )


def row_meta(case: Case, device: str = "cpu") -> RowMeta:
    """[B, T]; every packed row is as long as the longest with `case.padding` rows more."""
    rows = []
    for documents in case.lengths:
        halves = []
        for prompt, response in documents:
            sample = Sample.from_pair(range(prompt), range(response))
            if case.objective != "idlm":
                objective = OBJECTIVES.get(case.objective)(
                    mask_token_id=1,
                    mask_region=case.mask_region,
                    max_stride=case.stride,
                    stop_token_ids=(response - 1,),
                    max_padding=case.stride,
                )
                stage = Stage(index=0, stride=case.stride, num_steps=1, clean_weight=0.0)
                halves.append(objective.rows(sample, stage, (case.seed,)))
                continue
            noisy = noisy_rows(sample, mask_region=case.mask_region, stride=case.stride, mask_token_id=1)
            halves.append(SampleRows(noisy=noisy, clean=clean_rows(sample, case.mask_region)))
        rows.append(halves)
    size = max(sum(len(halves) for halves in documents) for documents in rows) + case.padding
    packed = [pack_rows(documents, size, pad_token_id=0) for documents in rows]

    def stacked(name: str) -> Tensor:
        return torch.from_numpy(np.stack([row[name] for row in packed])).to(device)

    return RowMeta(
        doc_ids=stacked("doc_ids"),
        positions=stacked("position_ids"),
        block_starts=stacked("block_starts"),
        is_noisy=stacked("is_noisy"),
        reach=stacked("reach"),
    )


def row_meta_of_one(case: Case, device: str = "cpu") -> tuple[RowMeta, int]:
    """One packed row, with its padding, and the number of its noisy rows."""
    meta = row_meta(dataclasses.replace(case, lengths=case.lengths[:1]), device)
    return meta, int((meta.is_noisy & (meta.doc_ids >= 0)).sum())


def ranges_of(meta: RowMeta, *, num_queries: int | None = None) -> Visibility:
    columns = meta.doc_ids, meta.positions, meta.block_starts, meta.is_noisy, meta.reach
    return visibility(*columns, num_queries=num_queries)


def inputs(case: Case, meta: RowMeta, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """query, key, value [B, heads, T, H] and the gradient [B, T, N, H]; NaN in every row of padding."""
    batch, num_rows = meta.doc_ids.shape
    device = meta.doc_ids.device
    generator = torch.Generator(device=device).manual_seed(case.seed)
    padding = (meta.doc_ids < 0)[:, :, None, None]

    def draw(heads: int) -> Tensor:
        shape = (batch, num_rows, heads, case.head_dim)
        drawn = torch.randn(shape, generator=generator, device=device).to(dtype)
        return drawn.masked_fill(padding, float("nan"))

    query, key, value = (
        draw(n).transpose(1, 2) for n in (case.num_heads, case.num_kv_heads, case.num_kv_heads)
    )
    return query, key, value, draw(case.num_heads)


def inputs_of_queries(
    case: Case, meta: RowMeta, num_queries: int | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The same with `num_queries` queries and gradients (None: all), for keys of all rows."""
    query, key, value, doutput = inputs(case, meta, dtype)
    return query[:, :, :num_queries], key, value, doutput[:, :num_queries]


def results(attend: Attend, tensors: tuple[Tensor, ...], dtype: torch.dtype) -> list[Tensor]:
    """Output and gradients of query, key and value."""
    *leaves, doutput = (tensor.detach().to(dtype) for tensor in tensors)
    leaves = [leaf.clone().requires_grad_() for leaf in leaves]
    output = attend(*leaves)
    output.backward(doutput)
    return [output.detach(), *(leaf.grad for leaf in leaves)]


def without_padding(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(tensor.nan_to_num(nan=0.0) for tensor in tensors)


def kernel(see: Visibility, scale: float) -> Attend:
    return lambda query, key, value: split_attention_ranges(query, key, value, see.tensors(), scale=scale)


def reference(see: Visibility, scale: float) -> Attend:
    return lambda query, key, value: split_attention_reference(query, key, value, see, scale=scale)
