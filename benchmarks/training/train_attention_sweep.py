"""Which launch parameters of split attention are best for gated LoRA, by kernel and shape.

    python -m benchmarks.train_attention_sweep [shapes=qwen3_0_6b,qwen3_8b] [rounds=7]
        [families=HOPPER_QUERIES,HOPPER_BACKWARD,WHOLE_BACKWARD,FORWARD]

Noisy rows attend to all rows, clean rows are keys without a gradient, as `benchmarks.train_step` has them:
one micro-batch of documents of 4096 tokens, one layer. In `WHOLE_BACKWARD` all rows are queries, as where all
weights train. A family is a constant of kernels/split_attention/launch.py, or which one the shape is given.
The chosen launches are checked against float64 first, every other one against them. All are compiled first,
in as many processes as there are cores. The times are those of a layer's forward pass of clean rows, forward
pass of noisy rows and whole backward pass, each the least of rounds in which all launches take turns: another
program on the GPU only adds to a time. The last line of a family sums over shapes.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels.attention_sweep import compile_everything, name_of, numbers
from benchmarks.kernels.train_attention import HEAD_DIM, NUM_KV_HEADS, packed_meta
from benchmarks.options import parse_options
from idlm.cli import command
from idlm.errors import UserError
from idlm.kernels.split_attention import launch as launches
from idlm.kernels.split_attention.launch import Launch
from idlm.kernels.split_attention.reference import split_attention_reference
from idlm.kernels.split_attention.visibility import Visibility
from idlm.masks import RowMeta
from idlm.train.model.attention import row_ranges

SHAPES = {"qwen3_0_6b": (16, 8), "qwen3_8b": (32, 2)}
"""Query heads, documents of a micro-batch."""
LENGTH, CHECKED_LENGTH, STRIDE = 4096, 300, 2
TOLERANCE = 0.02
"""Of the largest element: bfloat16 rounds probabilities and scores' gradients to 0.4 %."""
SHARED_BYTES = 227 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """Inputs of one layer, [1, heads, rows, H]: queries of M noisy rows, keys and values of all T rows."""

    query: Tensor
    key: Tensor
    value: Tensor
    doutput: Tensor
    noisy: Visibility
    clean_query: Tensor
    clean: Visibility
    whole: Visibility

    def forward(self) -> tuple[Tensor, Tensor]:
        return launches.run_forward(self.query, self.key, self.value, self.noisy, HEAD_DIM**-0.5)

    def forward_clean(self) -> Tensor:
        first = self.query.shape[2]
        keys = self.key[:, :, first:], self.value[:, :, first:]
        return launches.run_forward(self.clean_query, *keys, self.clean, HEAD_DIM**-0.5)[0]

    def backward(self, output: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
        inputs = self.doutput, self.query, self.key, self.value, output, lse
        return launches.run_backward(*inputs, self.noisy, HEAD_DIM**-0.5)

    def with_queries_of_all_rows(self) -> Layer:
        """The same layer where clean rows are queries too."""
        query = torch.cat((self.query, self.clean_query), dim=2)
        return replace(self, query=query, doutput=query.transpose(1, 2), noisy=self.whole)


def main() -> int:
    """Console entry point."""
    return command.run(measure)


def measure(arguments: list[str]) -> int:
    """Check, then print the best launches of every family; returns 1 where the chosen ones are wrong."""
    options = parse_options(arguments, DEFAULTS)
    names, families = options["shapes"].split(","), options["families"].split(",")
    if set(names) - SHAPES.keys() or set(families) - VARIANTS.keys():
        raise UserError(
            "IDLM-0107",
            f"shapes={options['shapes']} families={options['families']}",
            fix=f"shapes are {', '.join(SHAPES)}; families are {', '.join(VARIANTS)}",
        )
    if not torch.cuda.is_available():
        raise UserError("IDLM-0543", "no CUDA device", fix="run benchmarks.train_attention_sweep on a GPU")
    layers = {name: make_layer(*SHAPES[name], LENGTH) for name in names}
    if options["compile_part"]:
        return _compile_part(layers, families, options["compile_part"])
    start = time.perf_counter()
    errors = {name: largest_error(make_layer(*SHAPES[name], CHECKED_LENGTH)) for name in names}
    print(f"errors against float64, of the largest element: {errors}", flush=True)
    if not max(errors.values()) <= TOLERANCE:
        return 1
    compile_everything("benchmarks.training.train_attention_sweep", arguments)
    print(f"compiled in {time.perf_counter() - start:.0f} s", flush=True)
    for family in families:
        _rank(family, layers, int(options["rounds"]))
    print(f"{time.perf_counter() - start:.0f} s in all")
    return 0


def make_layer(num_heads: int, num_documents: int, length: int) -> Layer:
    """A micro-batch whose every token is supervised."""
    packed = packed_meta([length] * num_documents, STRIDE, num_documents * length)
    num_rows, num_noisy = int((packed.doc_ids >= 0).sum()), int(packed.is_noisy.sum())

    def rows(first: int) -> RowMeta:
        columns = ("doc_ids", "positions", "block_starts", "is_noisy")
        return RowMeta(**{name: getattr(packed, name)[:, first:num_rows] for name in columns})

    generator = torch.Generator(device=packed.doc_ids.device).manual_seed(0)

    def draw(count: int, heads: int) -> Tensor:
        shape = (1, count, heads, HEAD_DIM)
        drawn = torch.randn(shape, generator=generator, device=generator.device, dtype=torch.bfloat16)
        return drawn.transpose(1, 2)

    return Layer(
        query=draw(num_noisy, num_heads),
        key=draw(num_rows, NUM_KV_HEADS),
        value=draw(num_rows, NUM_KV_HEADS),
        doutput=draw(num_noisy, num_heads).transpose(1, 2),
        noisy=row_ranges(rows(0), num_queries=num_noisy),
        clean_query=draw(num_rows - num_noisy, num_heads),
        clean=row_ranges(rows(num_noisy)),
        whole=row_ranges(rows(0)),
    )


def largest_error(layer: Layer) -> float:
    """Of the output and the gradients of noisy rows, over the largest element of each."""
    num_noisy = layer.query.shape[2]
    output, lse = layer.forward()
    found = [output, *layer.backward(output, lse)]
    leaves = [x.detach().double().requires_grad_() for x in (layer.query, layer.key, layer.value)]
    query, key, value = leaves
    exact = split_attention_reference(query, key, value, layer.noisy, scale=HEAD_DIM**-0.5)
    exact.backward(layer.doutput.double())
    wanted = [exact, *(leaf.grad.transpose(1, 2)[:, :num_noisy] for leaf in leaves if leaf.grad is not None)]
    return max(
        _difference(mine[:, :num_noisy].double(), true) for mine, true in zip(found, wanted, strict=True)
    )


def _difference(one: Tensor, two: Tensor) -> float:
    return float((one - two).abs().max() / two.abs().max())


def _queries(chosen: Launch) -> Iterator[Launch]:
    tiles = [(64, 4, walk, stages) for walk in (32, 64, 128) for stages in (1, 2, 3, 4)]
    tiles += [(128, 8, walk, stages) for walk in (32, 64, 128) for stages in (1, 2, 3)]
    tiles += [(64, 8, walk, stages) for walk in (64, 128) for stages in (2, 3)]
    for rows, warps, walk, stages in tiles:
        if 2 * 2 * HEAD_DIM * (rows + stages * walk) <= SHARED_BYTES:
            yield replace(chosen, rows=rows, walk=walk, warps=warps, stages=stages)


def _forwards(chosen: Launch) -> Iterator[Launch]:
    for (rows, warps), walk, stages in itertools.product(((64, 4), (128, 8)), (64, 128), (2, 3, 4)):
        if 2 * HEAD_DIM * (rows + 2 * stages * walk) <= SHARED_BYTES:
            yield replace(chosen, rows=rows, walk=walk, warps=warps, stages=stages)


def _backwards(chosen: Launch) -> Iterator[Launch]:
    """The Gluon kernel is written for its tile."""
    for parts, stages in itertools.product((1, 2), (2, 3)):
        yield replace(chosen, parts=parts, stages=stages)


VARIANTS = {"HOPPER_QUERIES": _queries, "HOPPER_BACKWARD": _backwards, "WHOLE_BACKWARD": _backwards}
VARIANTS |= {"FORWARD": _forwards}
DEFAULTS = {"shapes": ",".join(SHAPES), "families": ",".join(VARIANTS), "rounds": "7", "compile_part": ""}


def constant_of(family: str, num_heads: int) -> str:
    """The constant that the kernels of a layer with so many query heads are launched with."""
    if family == "HOPPER_BACKWARD" and num_heads <= 2 * NUM_KV_HEADS:
        return "HOPPER_PAIRS"
    return "HOPPER_BACKWARD" if family == "WHOLE_BACKWARD" else family


def variants(family: str, constant: str) -> list[Launch]:
    """The launches of a family, the chosen one first."""
    chosen = getattr(launches, constant)
    return list(dict.fromkeys([chosen, *VARIANTS[family](chosen)]))


@contextmanager
def chosen_is(constant: str, launch: Launch) -> Iterator[None]:
    """Inside, the kernels of this constant are launched so."""
    before = getattr(launches, constant)
    setattr(launches, constant, launch)
    try:
        yield
    finally:
        setattr(launches, constant, before)


def _results(family: str, layer: Layer, kept: tuple[Tensor, Tensor]) -> list[Tensor]:
    """What the kernels of a family compute of a layer."""
    if family == "FORWARD":
        return [layer.forward_clean(), layer.forward()[0]]
    return list(layer.backward(*kept))


def _input(family: str, layer: Layer) -> Layer:
    return layer.with_queries_of_all_rows() if family == "WHOLE_BACKWARD" else layer


def _compile_part(layers: dict[str, Layer], families: list[str], part: str) -> int:
    from triton.runtime.errors import OutOfResources

    index, num_parts = numbers(part.replace("/", ","))
    everything = [
        (family, name, launch)
        for family in families
        for name in layers
        for launch in variants(family, constant_of(family, SHAPES[name][0]))
    ]
    for family, name, launch in everything[index::num_parts]:
        layer = _input(family, layers[name])
        kept = layer.forward()
        with suppress(OutOfResources), chosen_is(constant_of(family, SHAPES[name][0]), launch):
            _results(family, layer, kept)
    torch.cuda.synchronize()
    return 0


def _rank(family: str, layers: dict[str, Layer], rounds: int) -> None:
    """Print the launches of a family by the time of a layer, for each shape and over all shapes."""
    found = {}
    for name, layer in layers.items():
        constant = constant_of(family, SHAPES[name][0])
        found[name] = _times(family, constant, _input(family, layer), rounds)
        _print_best(f"{family} {name}", found[name], getattr(launches, constant))
    everywhere = set.intersection(*(set(times) for times in found.values()))
    chosen = {getattr(launches, constant_of(family, SHAPES[name][0])) for name in layers}
    if len(chosen) == 1:
        totals = {launch: sum(times[launch] for times in found.values()) for launch in everywhere}
        _print_best(f"{family} in all", totals, chosen.pop())


def _times(family: str, constant: str, layer: Layer, rounds: int) -> dict[Launch, float]:
    """Milliseconds of the launches that fit and compute what the chosen one does."""
    from triton.runtime.errors import OutOfResources

    kept = layer.forward()
    wanted, times = _results(family, layer, kept), {}
    for launch in variants(family, constant):
        with suppress(OutOfResources), chosen_is(constant, launch):
            made = _results(family, layer, kept)
            error = max(_difference(a, b) for a, b in zip(made, wanted, strict=True))
            if error <= TOLERANCE:
                times[launch] = float("inf")
            else:
                print(f"WRONG by {error:.3f}: {launch}")
    for _ in range(rounds):
        for launch in times:
            with chosen_is(constant, launch):
                times[launch] = min(times[launch], _milliseconds(partial(_results, family, layer, kept)))
    return times


def _print_best(title: str, times: dict[Launch, float], chosen: Launch) -> None:
    print(f"{title}: chosen {times[chosen]:.3f} ms", flush=True)
    for launch in sorted(times, key=lambda launch: times[launch])[:4]:
        print(f"  {times[launch]:.3f} ms {times[chosen] / times[launch]:.3f} x  {name_of(launch, chosen)}")


def _milliseconds(step: Callable[[], Any]) -> float:
    """Of one step; the mean of two, so that the host is ahead."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(2):
        step()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 2


if __name__ == "__main__":
    sys.exit(main())
