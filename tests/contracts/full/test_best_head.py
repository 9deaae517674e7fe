"""Greedy full-diffusion passes whose head stores no logits decide the tokens of those that store them.

The definition stands for the kernel on a CPU. tests/kernels/interpreted/best_head.py runs the kernel, and so
does tests/gpu/engine/test_full_gpu.py on a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from idlm.contracts import SamplingParams
from idlm.errors import UserError
from idlm.infer.engine import Engine
from idlm.infer.models.base import Shards
from idlm.infer.models.dense import DenseTrunk
from idlm.infer.mosaic.canvas_ops import CanvasRows
from idlm.infer.runtime.graphs import cuda_graphs
from idlm.infer.runtime.graphs.pass_shape import PassShape
from idlm.infer.state.batch import WantedRows
from idlm.kernels.masked_logits import Proposals
from tests.contracts.engines import assert_idle, prompts_of
from tests.contracts.full.canvases import MASK_ID, ORDERS, STOP_IDS, engine_of, slow_canvas, spread
from tests.contracts.full.canvases import PROMPTS as MIXED_PROMPTS
from tests.contracts.full.canvases import expected_of as mixed_case
from tests.contracts.full.slow_canvas import SlowCanvas
from tests.contracts.full.test_mosaic import poison, shortened, with_chunks
from tests.errors import refused
from tests.kernels.references.masked_logits import masked_logits_reference
from tests.margins import NearTie

SIZES = ((1, 12), (7, 8), (12, 16), (9, 24))
"""Tokens of prompts and answers."""
Case = tuple[list[int], SamplingParams, tuple[int, ...]]


class Counts:
    """Passes whose tokens came from the head's weight, and those whose tokens came from logits."""

    def __init__(self) -> None:
        self.best = self.logits = 0


def _defined(*given: Any, forbidden_S: torch.Tensor, entropy: bool, workspace: Any) -> Proposals:
    """Stands for the kernel on a CPU."""
    return masked_logits_reference(*given, forbidden_ids=forbidden_S.tolist())


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Counts:
    """From here on the device can run the head that stores no logits."""
    found, best = Counts(), WantedRows.best

    def counted_best(self: WantedRows, *args: Any, **kwargs: Any) -> Any:
        made = best(self, *args, **kwargs)
        found.best += made is not None
        return made

    def count_logits(kind: type[WantedRows]) -> None:
        proposals = kind.proposals

        def counted(self: WantedRows, propose: Any, *, row_bytes: int = 0) -> Any:
            found.logits += 1
            return proposals(self, propose, row_bytes=row_bytes)

        monkeypatch.setattr(kind, "proposals", counted)

    for kind in (WantedRows, CanvasRows):
        count_logits(kind)
    monkeypatch.setattr("idlm.infer.models.dense.has_fused", lambda device: True)
    monkeypatch.setattr("idlm.infer.state.batch.masked_logits", _defined)
    monkeypatch.setattr(WantedRows, "best", counted_best)
    return found


def greedy_cases(slow: SlowCanvas) -> list[Case]:
    """Greedy requests of several lengths without a near tie, and their answers."""
    cases = []
    for number, (size, max_tokens) in enumerate(SIZES):
        for seed in range(100 * number, 100 * number + 100):
            [prompt] = prompts_of([size], seed=seed)
            params = SamplingParams(temperature=0, seed=seed, max_tokens=max_tokens, ignore_eos=True)
            try:
                cases.append((prompt, params, slow.answer(prompt, params)[0]))
            except NearTie:
                continue
            break
        else:
            raise AssertionError("every prompt has a near tie")
    return cases


def check_answers(engine: Engine, cases: list[Case]) -> None:
    found = engine.generate([prompt for prompt, _, _ in cases], [params for _, params, _ in cases])
    assert [done.token_ids for done in found] == [tokens for _, _, tokens in cases]
    assert_idle(engine)


@pytest.mark.sweep_but(1)
@pytest.mark.parametrize(("family", "options"), spread(ORDERS), indirect=["family"], ids=str)
def test_tokens_equal_the_slow_decoder(
    family: tuple[str, Path], options: dict[str, Any], counts: Counts
) -> None:
    """Every order, in dynamic and in static shapes and in a planned workspace; topk_margin needs logits."""
    kind, directory = family
    cases = greedy_cases(slow_canvas(kind, options))
    for settings in ({"graphs": "off"}, {"graphs": "on"}, {"memory": "mosaic"}):
        counts.best = counts.logits = 0
        check_answers(engine_of(directory, options, **settings), cases)
        if options["order"] != "topk_margin":
            assert counts.best > 0 and counts.logits == 0, settings
        else:
            assert counts.best == 0 and counts.logits > 0, settings


@pytest.mark.sweep_but(settings={"graphs": "off"})
@pytest.mark.parametrize("settings", [{"graphs": "off"}, {"graphs": "on"}, {"memory": "mosaic"}], ids=str)
def test_greedy_warm_and_truncated_requests_share_passes(
    llada: Path, settings: dict[str, Any], counts: Counts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Passes of greedy requests alone store no logits, and the others do; shapes tell them apart."""
    options = {"order": "low_confidence", "block_length": 4}
    slow = slow_canvas("llada", options)
    cases = [mixed_case(slow, number) for number in range(len(MIXED_PROMPTS))]
    assert {params.temperature for params, _, _ in cases} == {0.0, 0.7, 1.0}
    shapes, shape_of = [], cuda_graphs.shape_of

    def recorded(*args: Any, **options: Any) -> PassShape:
        shapes.append(shape_of(*args, **options))
        return shapes[-1]

    monkeypatch.setattr(cuda_graphs, "shape_of", recorded)
    engine = engine_of(llada, options, **settings)
    params, tokens, num_passes = cases[0]
    assert params.temperature == 0
    [alone] = engine.generate(MIXED_PROMPTS[:1], params)
    assert alone.token_ids == tokens and counts.best == num_passes
    found = engine.generate(MIXED_PROMPTS, [params for params, _, _ in cases])
    assert [done.token_ids for done in found] == [tokens for _, tokens, _ in cases]
    assert counts.logits > 0
    if settings.get("graphs") == "on":
        assert {shape.payload.is_greedy for shape in shapes} == {True, False}
    assert_idle(engine)


def head_of(engine: Engine) -> torch.Tensor:
    return engine._parts.model.trunk.head.data


def test_ties_go_to_the_lower_id(llada: Path, counts: Counts, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each token of the head has a twin one id above, with the same logit of the same bits."""
    found = []
    for uses_best in (True, False):
        engine = engine_of(llada, {"order": "low_confidence"})
        head_of(engine)[1::2] = head_of(engine)[::2]
        if uses_best:
            found.append(answers(engine))
            assert counts.best > 0 and counts.logits == 0
        else:
            monkeypatch.setattr(DenseTrunk, "head_weight", None)
            found.append(answers(engine))
    assert found[0] == found[1] and all(token % 2 == 0 for tokens in found[0] for token in tokens)


def answers(engine: Engine) -> list[tuple[int, ...]]:
    params = SamplingParams(temperature=0, seed=1, max_tokens=12, ignore_eos=True)
    return [done.token_ids for done in engine.generate(prompts_of([3, 9, 5], seed=4), params)]


@pytest.mark.parametrize("memory", ["caching", "mosaic"])
@pytest.mark.parametrize("forbids", [True, False])
def test_what_may_not_be_drawn_is_not_drawn(llada: Path, forbids: bool, memory: str, counts: Counts) -> None:
    """The mask and, with `forbid_eos`, the stop token would be the likeliest of many rows. Logits of what is
    forbidden mean nothing, NaN included."""
    engine = engine_of(llada, {"order": "maskgit_plus", "forbid_eos": forbids}, memory=memory)
    head_VD, likely = head_of(engine), answers(engine)[0][0]
    assert likely not in (MASK_ID, *STOP_IDS)
    head_VD[STOP_IDS[0]] = 4 * head_VD[likely]
    head_VD[MASK_ID] = torch.nan if forbids else 4 * head_VD[likely]
    tokens = [token for answer in answers(engine) for token in answer]
    assert MASK_ID not in tokens and (STOP_IDS[0] not in tokens) == forbids
    assert counts.best > 0 and counts.logits == 0


@pytest.mark.parametrize("uses_best", [True, False])
def test_logits_that_are_not_finite_fail_the_request(
    llada: Path, uses_best: bool, counts: Counts, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(llada, {"order": "low_confidence"})
    head_of(engine)[3] = torch.nan
    if not uses_best:
        monkeypatch.setattr(DenseTrunk, "head_weight", None)
    refused("IDLM-0457", answers, engine)
    assert (counts.best > 0) == uses_best
    assert_idle(engine)


@pytest.mark.parametrize("planted", [False, True])
def test_nothing_is_read_after_its_lifetime(
    llada: Path, planted: bool, counts: Counts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With every range of the workspace NaN once its lifetime ends; a lifetime one op too short is caught."""
    options = {"order": "low_confidence", "block_length": 4}
    cases = greedy_cases(slow_canvas("llada", options))
    ended = poison(monkeypatch)
    engine = engine_of(llada, options, memory="mosaic")
    with_chunks(engine, {"ffn": 3, "query": 3})
    runner: Any = engine._parts.runner
    template = runner.plan_of(20, 10, takes_best=True).template
    if planted:
        shortened(template, "x")
        with pytest.raises((AssertionError, UserError)):
            check_answers(engine, cases)
    else:
        check_answers(engine, cases)
        assert set(ended) == template.tensors.keys() - {"tokens", "confidences"}
    assert counts.logits == 0


def test_a_workspace_too_small_for_it_stores_logits(llada: Path, counts: Counts) -> None:
    options = {"order": "low_confidence", "block_length": 4}
    engine = engine_of(llada, options, memory="mosaic")
    runner: Any = engine._parts.runner
    runner.capacity, runner.min_rows = 1 << 20, 4
    check_answers(engine, greedy_cases(slow_canvas("llada", options)))
    assert counts.best == 0 and counts.logits > 0 and runner.arena.num_bytes <= 1 << 20


def test_a_part_of_the_head_and_products_of_few_rows_need_logits(llada: Path, counts: Counts) -> None:
    trunk = engine_of(llada, {})._parts.model.trunk
    assert trunk.head_weight is trunk.head
    trunk.linears.deterministic = True
    assert trunk.head_weight is None
    trunk.linears.deterministic = False
    trunk.shards = Shards(rank=0, size=2)
    assert trunk.head_weight is None
