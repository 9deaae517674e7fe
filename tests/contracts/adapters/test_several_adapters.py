"""Several gated adapters of one base in one engine: each request's drafts are those of its own adapter, its
answer is the base's, and KV does not depend on either."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from idlm.contracts import SamplingParams
from idlm.errors import UserError
from idlm.infer.engine import Engine
from idlm.infer.runtime.model_runner import Runner
from idlm.infer.state.batch import StepPlan
from idlm.kernels.gated_lora import MAX_ADAPTERS, group_rows, types
from idlm.kernels.gated_lora.types import RowGroups, rows_of
from idlm.semantics import Semantics
from tests.adapters import add_selector, write_adapter
from tests.contracts.engines import (
    CYCLE,
    MASK_ID,
    acceptance_of,
    answers,
    assert_idle,
    build_engine,
    clear_answers,
    greedy,
    prompts_of,
    write_foreseeing_toy,
)
from tests.toy import write_toy_checkpoint

NAMES = (None, "wide", "own_row")
OWN = greedy(max_tokens=16)
SHAPES: dict[str | None, dict[str, Any]] = {
    None: {"rank": 3},
    "wide": {"rank": 20, "alpha": 5.0, "seed": 1, "stride": 8, "size": 0.2},
    "own_row": {"rank": 5, "has_mask_row": True, "seed": 2, "targets": ("q_proj", "down_proj"), "size": 0.3},
}


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> dict[str | None, Path]:
    """A base that foresees by itself, and adapters of other ranks, scalings and targets that spoil only some
    of its drafts."""
    home = tmp_path_factory.mktemp("family")
    base = write_foreseeing_toy(home / "base", num_steps=60)
    shape: dict[str, Any] = {"mask_token_id": MASK_ID, "stride": 4, "size": 0.12}
    return {name: write_adapter(home / str(name), base, **shape | own) for name, own in SHAPES.items()}


def several(family: dict[str | None, Path], **options: Any) -> Engine:
    further = {name: str(family[name]) for name in NAMES if name is not None}
    return build_engine(family[None], "isd", **{"stride": 4, "adapters": further} | options)


def base_of(family: dict[str | None, Path]) -> Path:
    return family[None].parent / "base"


def drafts_of(engine: Engine, prompts: list[list[int]], params: list[SamplingParams]) -> list[Any]:
    """Of each request, the drafts that followed each number of known tokens."""
    for number, (prompt, one) in enumerate(zip(prompts, params, strict=True)):
        engine.add_request(str(number), prompt, one)
    found: list[dict[int, list[int]]] = [{} for _ in prompts]
    while engine.has_work:
        engine.step()
        for request in engine.scheduler.running:
            if request.token_ids:
                drafts = engine.decoder.drafts_ZJ[request.lane].tolist()
                found[int(request.request_id)].setdefault(request.num_known, drafts)
    return found


@pytest.mark.decides
def test_drafts_are_those_of_an_engine_with_that_adapter_alone(
    family: dict[str | None, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Token for token; and the power of the test: rows that read the next adapter draft other tokens."""
    prompts = prompts_of([5, 9, 3, 30, 1, 7], vocab_size=CYCLE)
    of_prompts = [NAMES[number % 3] for number in range(6)]
    alone = {
        name: drafts_of(build_engine(family[name], "isd", stride=4), prompts, [OWN] * 6) for name in NAMES
    }
    assert alone[None] != alone["wide"] != alone["own_row"] != alone[None]
    own = [replace(OWN, adapter=name) for name in of_prompts]
    expected = [alone[name][number] for number, name in enumerate(of_prompts)]
    assert drafts_of(several(family), prompts, own) == expected
    gate = Runner._gate

    def of_the_next(self: Runner, plan: StepPlan) -> Tensor | None:
        gate_R = gate(self, plan)
        assert gate_R is not None and plan.is_mask_R is not None
        return torch.where(plan.is_mask_R, gate_R % 3 + 1, 0).to(torch.uint8)

    monkeypatch.setattr(Runner, "_gate", of_the_next)
    wrong = drafts_of(several(family), prompts, own)
    assert all(mine != other for mine, other in zip(wrong, expected, strict=True))


@pytest.mark.sweep_but(2)
@pytest.mark.decides
@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        ("tree", {"num_pages": 30}),
        ("branch", {"graphs": "on", "adaptive": True, "num_inflight_steps": 2}),
        ("cold", {"prefix_cache": False, "max_num_batched_tokens": 5}),
        ("alternate", {"num_pages": 30}),
    ],
    ids=str,
)
def test_greedy_answers_are_the_bases(
    family: dict[str | None, Path], strategy: str, options: dict[str, Any]
) -> None:
    """With chunked prompts, preemption, and passes of static shape."""
    prompts = prompts_of([1, 7, 30, 5, 17, 30], vocab_size=CYCLE)
    expected = answers(clear_answers(build_engine(base_of(family), "ar"), prompts, OWN))
    engine = several(family, rejection_strategy=strategy, **options)
    found = engine.generate(prompts, [replace(OWN, adapter=NAMES[number % 3]) for number in range(6)])
    assert answers(found) == expected
    assert acceptance_of(found) > 0.1
    assert_idle(engine)


@pytest.mark.decides
def test_requests_of_other_adapters_share_cached_prefixes(family: dict[str | None, Path]) -> None:
    """The gate is closed on every token that is stored: its KV is the base's, whatever the adapter."""
    prompts = prompts_of([24], vocab_size=CYCLE)
    engine = several(family)
    for number, name in enumerate(NAMES):
        [found] = engine.generate(prompts, replace(OWN, adapter=name))
        assert (found.num_cached_tokens > 0) == (number > 0)
        [alone] = build_engine(family[name], "isd", stride=4).generate(prompts, OWN)
        assert answers([found]) == answers([alone])
        assert found.accepted_by_position == alone.accepted_by_position


def refused(path: Path, adapters: dict[str, Path], code: str, *words: object, **options: Any) -> None:
    given = {name: str(folder) for name, folder in adapters.items()}
    with pytest.raises(UserError) as caught:
        build_engine(path, "isd", adapters=given, **options)
    assert caught.value.code == code, caught.value
    for word in words:
        assert str(word) in str(caught.value)


def test_adapters_that_do_not_go_together_are_refused(family: dict[str | None, Path], tmp_path: Path) -> None:
    first, base = family[None], base_of(family)
    shape: dict[str, Any] = {"mask_token_id": MASK_ID, "stride": 4}
    other_mask = write_adapter(tmp_path / "mask", base, **shape | {"mask_token_id": MASK_ID - 1})
    refused(first, {"x": other_mask}, "IDLM-0626", "'x'", other_mask, first, "mask_token_id=46 (not 47)")
    uniform = write_adapter(tmp_path / "u", base, **shape | {"mask_token_id": None}, noise_range=(0, 9))
    refused(first, {"x": uniform}, "IDLM-0626", "noise_range=(0, 9)")
    short = write_adapter(tmp_path / "short", base, **shape | {"stride": 2})
    refused(first, {"x": short}, "IDLM-0626", short, first, "decoder.stride=2")
    assert build_engine(first, "isd", adapters={"x": str(short)}, stride=2).decoder.stride == 2
    selecting = write_adapter(tmp_path / "selecting", base, **shape)
    add_selector(selecting, vocab_size=48, width=32)
    refused(first, {"x": selecting}, "IDLM-0626", selecting, "decoder.selector=false")
    build_engine(first, "isd", adapters={"x": str(selecting)}, selector=False)
    refused(base, {"x": first}, "IDLM-0626", "base=")
    refused(first, {"x": base}, "IDLM-0303", base)
    refused(first, {"x": tmp_path / "none"}, "IDLM-0600", "none")
    merged = write_adapter(tmp_path / "merged", base, **shape)
    replace(Semantics.load(merged), gated=False).save(merged)
    refused(first, {"x": merged}, "IDLM-0609", merged)
    many = dict.fromkeys(map(str, range(MAX_ADAPTERS)), first)
    refused(first, many, "IDLM-0626", "names 254", "name 253 of them")
    stranger = write_toy_checkpoint(tmp_path / "stranger", seed=9)
    refused(first, {"x": write_adapter(tmp_path / "of", stranger, **shape)}, "IDLM-0612", base)


def test_a_gate_tells_all_adapters_of_an_engine_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    gate_R = torch.arange(MAX_ADAPTERS + 1, dtype=torch.uint8)
    assert rows_of(group_rows(gate_R, MAX_ADAPTERS)) == tuple(slice(n, n + 1) for n in gate_R.tolist()[1:])
    monkeypatch.setattr(types, "runs_kernels", lambda x: True)
    groups = group_rows(gate_R, MAX_ADAPTERS)
    assert isinstance(groups, RowGroups) and groups.starts.tolist() == [*range(MAX_ADAPTERS + 2)]


def test_a_request_names_an_adapter_that_the_engine_has(family: dict[str | None, Path]) -> None:
    with pytest.raises(UserError) as caught:
        several(family).generate([[1]], replace(OWN, adapter="law"))
    assert caught.value.code == "IDLM-0490" and "'wide', 'own_row'" in str(caught.value)
