"""Routing and experts on a CUDA device: random shapes of each against float64 with NaN in the padding,
bits of a row at any number of rows and with any tiles, graphs with changing choices, engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from idlm.contracts import SamplingParams
from idlm.kernels.experts import Routing, experts, route
from idlm.kernels.experts.launch import COMPUTED, EXACT, STREAMED, ExpertsLaunch
from tests.contracts.engines import assert_idle, build_engine, clear_answers
from tests.kernels.cases.experts import LARGE, Case, check_block_route, check_experts, check_route
from tests.numerics.test_family_parity import BLOCK, MASK, llada2, llada22

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LAUNCHES = (*STREAMED.values(), *COMPUTED.values())
SHAPES_PER_BATCH, BATCHES = 126, 2
ROUTING = Routing(num_chosen=8, score="softmax", is_normalised=True)


def launch_of(seed: int, dtype: torch.dtype) -> ExpertsLaunch:
    """Every launch in bf16 and one in fp16: only products differ, and compiling takes time."""
    if dtype == torch.float32:
        return EXACT
    return LAUNCHES[seed // 3 % len(LAUNCHES) if dtype == torch.bfloat16 else 1]


@pytest.mark.parametrize("batch", range(BATCHES))
def test_random_routers_choose_as_in_fp64(batch: int) -> None:
    for seed in range(batch * SHAPES_PER_BATCH, (batch + 1) * SHAPES_PER_BATCH):
        check_route(Case(seed, "cuda", DTYPES[seed % 3], LARGE))


@pytest.mark.parametrize("batch", range(BATCHES))
def test_random_blocks_admit_and_choose_as_in_fp64(batch: int) -> None:
    for seed in range(batch * SHAPES_PER_BATCH, (batch + 1) * SHAPES_PER_BATCH):
        check_block_route(seed, "cuda", DTYPES[seed % 3], max_blocks=12)


@pytest.mark.parametrize("batch", range(BATCHES))
def test_random_experts_are_as_exact_as_pytorch(batch: int) -> None:
    for seed in range(batch * SHAPES_PER_BATCH, (batch + 1) * SHAPES_PER_BATCH):
        dtype = DTYPES[seed % 3]
        check_experts(Case(seed, "cuda", dtype, LARGE), launch_of(seed, dtype))


class Layer:
    """128 experts of 2048 x 768 in bf16, and 600 rows."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        draw: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
        self.x = torch.randn(600, 2048, **draw)
        self.logits = torch.randn(600, 128, **draw)
        self.gate_up = torch.randn(128, 2 * 768, 2048, **draw) * 2048**-0.5
        self.down = torch.randn(128, 2048, 768, **draw) * 768**-0.5

    def __call__(self, rows: slice, **options: Any) -> torch.Tensor:
        chosen, weights = route(self.logits[rows], ROUTING)
        return experts(self.x[rows], self.gate_up, self.down, chosen, weights, **options)


def test_a_row_has_its_bits_at_any_number_of_rows_and_with_any_tiles() -> None:
    layer = Layer()
    whole = layer(slice(0, 600))
    for launch in LAUNCHES:
        assert torch.equal(layer(slice(0, 600), launch=launch), whole), launch
    for num_rows in (1, 2, 7, 16, 17, 64, 65, 130, 448):
        for first in (0, 150):
            rows = slice(first, first + num_rows)
            assert torch.equal(layer(rows), whole[rows]), f"{num_rows=} {first=}"


def test_many_rows_on_few_experts() -> None:
    """All 600 rows choose the same 8 experts; the programs of all other experts do nothing."""
    layer = Layer()
    spread = layer(slice(0, 600))
    layer.logits[:] = layer.logits[0]
    crowded = layer(slice(0, 600))
    assert torch.equal(crowded[0], spread[0])
    assert torch.equal(crowded[599], layer(slice(599, 600))[0])


@pytest.mark.parametrize("num_rows", [1, 5, 64])
def test_a_graph_follows_the_choices_of_rows(num_rows: int) -> None:
    """With programmatic launches; padding rows of NaN come and go."""
    layer = Layer()
    x, logits = layer.x[:num_rows].clone(), layer.logits[:num_rows].clone()
    slots = torch.arange(num_rows, device="cuda")

    def step(pdl: bool) -> torch.Tensor:
        chosen, weights = route(logits, ROUTING, slots_R=slots, pdl=pdl)
        once = experts(x, layer.gate_up, layer.down, chosen, weights, pdl=pdl)
        return experts(once, layer.gate_up, layer.down, chosen, weights, shared_RD=x, pdl=pdl)

    step(True), step(False)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(True)
    for seed in range(20):
        torch.manual_seed(seed)
        x.copy_(torch.randn(x.shape))
        logits.copy_(torch.randn(logits.shape))
        slots.copy_(torch.arange(num_rows))
        if seed % 2:
            slots[num_rows // 2], x[num_rows // 2] = -1, float("nan")
        graph.replay()
        expected = step(False)
        assert torch.equal(captured, expected), seed
        assert expected.isfinite().all()


def often_edited(directory: Path) -> None:
    """LLaDA2.2 whose rows often delete and split positions."""
    llada22(directory, likely=(91, 92))


EDITS = {"threshold": 0.5, "edit_threshold": 0.2}


@pytest.mark.parametrize(
    ("write", "options", "way"),
    [
        (llada2, {}, {}),
        (llada2, {}, {"graphs": "off"}),
        (llada22, EDITS, {}),
        (often_edited, EDITS, {}),
        (often_edited, EDITS, {"deterministic": True}),
    ],
)
def test_an_engine_gives_the_tokens_of_a_cpu(
    tmp_path: Path, write: Any, options: dict[str, Any], way: dict[str, Any]
) -> None:
    """Graphs are on by default, and hold experts, chosen by row and by block, and edits."""
    write(tmp_path)
    params = SamplingParams(temperature=0.0, max_tokens=3 * BLOCK, ignore_eos=True)
    prompts = [[(7 * index + 5 * number) % MASK for index in range(3 * number + 1)] for number in range(6)]
    expected = clear_answers(build_engine(tmp_path, "block", **options), prompts, params)
    engine = build_engine(tmp_path, "block", device="cuda", **options, **way)
    assert engine.settings.graphs == way.get("graphs", "on")
    found = engine.generate(prompts, params)
    assert [answer.token_ids for answer in found] == [answer.token_ids for answer in expected]
    assert_idle(engine)
