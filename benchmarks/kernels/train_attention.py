"""Attention of `[x_t | x_0]` rows, forward and backward: our kernel against FlexAttention and dense SDPA.

    python -m benchmarks.train_attention [record=true] [length=4096] [rounds=7]
        [strides=2,3,4,8] [packed=false,true]

Checks every arm against float64 first. Then all arms take turns, so that clocks and neighbours affect them
equally, each time with a cold L2 cache; medians.
"flash" is FlexAttention with FlashAttention 4 (pip install -e '.[flash-attn]') as its back end. Where it is
absent or fails, the reason is printed and the other arms are measured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.shared import Report, defaults, numbers, parse_options, print_absent, run_arms, start
from benchmarks.stream import ms_in_turns
from idlm.kernels.split_attention import split_attention_ranges
from idlm.masks import RowMeta, dense_mask
from idlm.train.data.layout import Sample, SampleRows, clean_rows, noisy_rows, pack_rows
from idlm.train.model.attention import flash_problem, flex_block_mask, row_ranges

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 32, 8, 128
SHORTEST, LONGEST = 300, 2000
CHECKED_LENGTH = 768
FLUSHED_BYTES = 1 << 33
"""More than the L2 cache, and 2 ms by which the host is ahead of the device, as it does in training."""
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
DEFAULTS = defaults("length=4096 rounds=7 record=false strides=2,3,4,8 packed=false,true")


def measure(arguments: list[str]) -> int:
    options = parse_options(arguments, DEFAULTS, needs_gpu="train_attention")
    length, rounds = int(options["length"]), int(options["rounds"])
    report, absent = Report("train_attention", options), dict[str, str]()
    for packed in (word == "true" for word in options["packed"].split(",")):
        for stride in numbers(options["strides"]):
            documents = packed_lengths(length, seed=stride) if packed else [length]
            gates = _errors(documents, stride, absent)
            times = _times(documents, stride, rounds, {*gates}, absent)
            _add(report, {"stride": stride, "length": length, "packed": packed}, times, gates)
    print_absent(absent)
    return 0


def packed_lengths(total: int, *, seed: int) -> list[int]:
    """Lengths of SHORTEST to LONGEST tokens that make `total`."""
    rng = np.random.default_rng(seed)
    lengths: list[int] = []
    while (left := total - sum(lengths)) >= 2 * SHORTEST:
        lengths.append(int(rng.integers(SHORTEST, min(LONGEST, left - SHORTEST) + 1)))
    return [*lengths, left]


def packed_meta(documents: list[int], stride: int, length: int) -> RowMeta:
    """One packed row of 2 * `length` rows, every position supervised."""
    halves = []
    for num_tokens in documents:
        sample = Sample.from_pair([], range(num_tokens))
        noisy = noisy_rows(sample, mask_region="all", stride=stride, mask_token_id=0)
        halves.append(SampleRows(noisy=noisy, clean=clean_rows(sample, "all")))
    row = pack_rows(halves, 2 * length, pad_token_id=0)
    names = {"doc_ids": "doc_ids", "positions": "position_ids", "block_starts": "block_starts"}
    tensors = {field: torch.from_numpy(row[name])[None].cuda() for field, name in names.items()}
    return RowMeta(**tensors, is_noisy=torch.from_numpy(row["is_noisy"])[None].cuda())


def _inputs(num_rows: int) -> tuple[list[Tensor], Tensor]:
    """query, key, value [B, heads, T, H], in memory as projections leave them; gradient [B, T, N, H]."""
    generator = torch.Generator(device="cuda").manual_seed(0)

    def draw(heads: int) -> Tensor:
        shape = (1, num_rows, heads, HEAD_DIM)
        return torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)

    leaves = [
        draw(heads).transpose(1, 2).requires_grad_() for heads in (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS)
    ]
    return leaves, draw(NUM_HEADS)


def _arms(meta: RowMeta, wanted: set[str]) -> dict[str, Attend]:
    """Functions of query, key, value to [B, T, N, H]; masks are created once, as for a whole model."""
    from torch.nn.attention.flex_attention import flex_attention

    see = row_ranges(meta)
    ranges = see.tensors()
    block_mask = flex_block_mask(see)
    compiled = torch.compile(flex_attention, dynamic=False)

    def flex(backend: str | None) -> Attend:
        kernel_options: Any = None if backend is None else {"BACKEND": backend}
        return lambda q, k, v: compiled(
            q, k, v, block_mask=block_mask, enable_gqa=True, kernel_options=kernel_options
        ).transpose(1, 2)

    arms: dict[str, Attend] = {
        "split": lambda q, k, v: split_attention_ranges(q, k, v, ranges, scale=HEAD_DIM**-0.5),
        "flex": flex(None),
        "flash": flex("FLASH"),
    }
    if "dense" in wanted:
        mask = dense_mask(meta)[:, None]
        arms["dense"] = lambda q, k, v: functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, enable_gqa=True
        ).transpose(1, 2)
    return {name: attend for name, attend in arms.items() if name in wanted}


def _results(attend: Attend, leaves: list[Tensor], doutput: Tensor, dtype: torch.dtype) -> list[Tensor]:
    copies = [leaf.detach().to(dtype).requires_grad_() for leaf in leaves]
    output = attend(*copies)
    output.backward(doutput.to(dtype))
    return [output.detach(), *(copy.grad for copy in copies if copy.grad is not None)]


def _errors(documents: list[int], stride: int, absent: dict[str, str]) -> dict[str, float]:
    """Largest error of each arm against float64 over that of dense SDPA, on documents cut to a small size.

    `absent` gets the reason of each arm that cannot run."""
    if (problem := flash_problem()) is not None:
        absent["flash"] = ": ".join(problem)
    shrink = CHECKED_LENGTH / sum(documents)
    meta = packed_meta([max(2, int(length * shrink)) for length in documents], stride, CHECKED_LENGTH)
    leaves, doutput = _inputs(meta.doc_ids.shape[1])
    is_real = (meta.doc_ids >= 0)[..., None, None]
    doutput = doutput * is_real
    arms = _arms(meta, {"split", "flex", "flash", "dense"} - absent.keys())
    exact = _results(arms["dense"], leaves, doutput, torch.float64)
    exact[0] *= is_real

    def errors_of(attend: Attend) -> list[float]:
        tensors = _results(attend, leaves, doutput, torch.bfloat16)
        tensors[0] *= is_real
        return [float((mine.double() - true).abs().max()) for mine, true in zip(tensors, exact, strict=True)]

    errors = run_arms(arms, errors_of, required={"split", "flex", "dense"}, absent=absent)
    own = errors.pop("dense")
    return {name: max(a / b for a, b in zip(arm, own, strict=True)) for name, arm in errors.items()}


def _times(
    documents: list[int], stride: int, rounds: int, wanted: set[str], absent: dict[str, str]
) -> dict[str, float]:
    """Median milliseconds of a forward and backward pass of each arm, in turns."""
    meta = packed_meta(documents, stride, sum(documents))
    leaves, doutput = _inputs(meta.doc_ids.shape[1])
    steps = {name: _step(attend, leaves, doutput) for name, attend in _arms(meta, wanted).items()}
    flushed = torch.empty(FLUSHED_BYTES, dtype=torch.int8, device="cuda")

    def warm_up(step: Callable[[], None]) -> Callable[[], None]:
        for _ in range(2):
            step()
        return step

    steps = run_arms(steps, warm_up, required=steps.keys() - {"flash"}, absent=absent)
    return ms_in_turns(steps, rounds, before=flushed.zero_)


def _step(attend: Attend, leaves: list[Tensor], doutput: Tensor) -> Callable[[], None]:
    def step() -> None:
        attend(*leaves).backward(doutput)
        for leaf in leaves:
            leaf.grad = None

    return step


def _add(report: Report, case: dict[str, Any], times: dict[str, float], gates: dict[str, float]) -> None:
    """Time and speed-up over FlexAttention's Triton back end in the same run; gate: twice PyTorch's error.

    `flex=fa4` in a case: over FlexAttention with FlashAttention 4, if that is as exact."""
    for arm in sorted(gates.keys() & times.keys() - {"flex"}):
        where, gate = case | {"arm": arm}, gates[arm] <= 2
        report.add(where, "speedup_vs_flex", times["flex"] / times[arm], "x", gate_passed=gate)
        report.add(where, "ms", times[arm], "ms", baseline=times["flex"], gate_passed=gate)
    if "flash" in times and gates["flash"] <= 2:
        where, speedup = case | {"arm": "split", "flex": "fa4"}, times["flash"] / times["split"]
        report.add(where, "speedup_vs_flex", speedup, "x", gate_passed=gates["split"] <= 2)


if __name__ == "__main__":
    start(measure, __doc__)
