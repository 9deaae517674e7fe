"""Sparse passes have static shapes, never wait for the device, and rows that do not fit change no answer.

Two toys, one file each, stand for accelerators to come; the accelerators of the package go the same ways."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from idlm.contracts import Completion
from idlm.errors import UserError
from idlm.infer.engine import Engine
from idlm.infer.models import dense
from idlm.infer.runtime.model_runner import Runner
from idlm.infer.runtime.worker import InflightStep
from idlm.infer.sparse.accelerator import ACCELERATORS
from idlm.infer.sparse.stack import SparseKV
from idlm.infer.state.page_pool import KVCache
from idlm.kernels.row_compaction import flagged
from tests.accelerator_reference import SlowLists
from tests.block_reference import Sampling
from tests.contracts.accelerators.cases import (
    FOCUS,
    PARAMS,
    PROMPTS,
    SETTINGS,
    SIZE,
    STACKS,
    THIN,
    TIGHT,
    engine_of,
    force,
    rules_of,
    tokens,
)
from tests.contracts.engines import assert_idle, greedy
from tests.contracts.plugins.plugged_in import plugged_in
from tests.errors import refused

TOYS = Path(__file__).parents[1] / "toys" / "accelerators"
HALF: dict[str, Any] = {"first_half": {}}
TOY_STACKS: list[dict[str, Any]] = [
    {"even_pages": {}},
    HALF,
    {"even_pages": {}, **HALF},
    {"mage": THIN["mage"], **HALF},
    {"quest": THIN["quest"], **HALF},
]
WAYS: list[dict[str, Any]] = [
    {"graphs": "on", "num_inflight_steps": 4, "max_num_seqs": 5, "max_num_batched_tokens": 16},
    {"graphs": "on", "num_pages": 30, "max_num_seqs": 4, "num_inflight_steps": 3},
]


@pytest.fixture(autouse=True)
def plugged() -> Iterator[None]:
    """The toys are in the registry, by their files alone, for as long as a test runs."""
    with plugged_in(ACCELERATORS, TOYS) as added:
        assert added == ["even_pages", "first_half"]
        yield


class Watch:
    """How many sequences waited in each sparse pass, and rows before and after what was dropped."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.num_waiting: list[int] = []
        self.widths: list[tuple[int, int]] = []
        finish = SparseKV.finish

        def watched(kv: SparseKV) -> Any:
            result = finish(kv)
            self.num_waiting.append(int(kv.view.waits_B.sum()))
            self.widths.append((len(kv.view.plan.slots_R), len(kv.plan.slots_R)))
            return result

        patch.setattr(SparseKV, "finish", watched)


@pytest.fixture(scope="module")
def answers_alone(toys: dict[str, Path]) -> Any:
    """Tokens of a stack on a toy, each request alone, which the tests of several ways share."""
    known: dict[str, Any] = {}

    def answers(stack: dict[str, Any] | str, kind: str = "block") -> Any:
        if (key := f"{kind} {stack}") not in known:
            engine = engine_of(toys, kind, accelerators=stack, max_num_seqs=1)
            known[key] = tokens(engine.generate(PROMPTS, PARAMS))
        return known[key]

    return answers


class SlowEvenPages:
    def begin(self, block: int, step: int, num_steps: int) -> None:
        pass

    def lists(self, layer: int, q_WNH: Tensor, k_PKH: Tensor) -> list[list[int]]:
        return [[slot for slot in range(len(k_PKH)) if slot // 4 % 2 == 0]] * k_PKH.shape[1]


@pytest.mark.sweep
@pytest.mark.decides
def test_every_second_page_is_what_rows_see(toys: dict[str, Path]) -> None:
    found = engine_of(toys, accelerators="even_pages").generate(PROMPTS, PARAMS)
    slow = SlowLists(toys["block"], rules_of("block"), SlowEvenPages())
    for number, completion in enumerate(found):
        expected, _ = slow.answer(PROMPTS[number], Sampling(seed=number, **SETTINGS[number]))
        assert list(completion.token_ids) == expected
    assert found[0].exactness == "lossy"


def test_options_of_a_new_accelerator_are_checked(toys: dict[str, Path]) -> None:
    with pytest.raises(UserError, match="even_pages and mage are both of the kv side"):
        engine_of(toys, accelerators=("even_pages", "mage"))
    message = r"accelerators\.even_pages\.pages is not one of its options; did you mean 'page'"
    refused(message, engine_of, toys, accelerators={"even_pages": {"pages": 3}})


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("stack", "kind"), [*((stack, "block") for stack in TOY_STACKS[2:]), (HALF, "shifted")], ids=str
)
def test_batches_static_shapes_and_waiting_change_no_answer(
    toys: dict[str, Path],
    answers_alone: Any,
    monkeypatch: pytest.MonkeyPatch,
    stack: dict[str, Any],
    kind: str,
) -> None:
    """Greedy and drawn; against each request alone, in passes of just its rows, with room for all of them."""
    expected = answers_alone(stack, kind)
    assert expected != answers_alone("exact", kind), "the toy must matter, or nothing was tested"
    for way in WAYS:
        with monkeypatch.context() as patch:
            watch, fits = Watch(patch), "first_half" not in stack
            force(patch, None if fits else TIGHT)
            engine = engine_of(toys, kind, accelerators=stack, **way)
            assert engine.settings.graphs == way.get("graphs", engine.settings.graphs)
            assert tokens(engine.generate(PROMPTS, PARAMS)) == expected
        assert_idle(engine)
        assert (sum(watch.num_waiting) == 0) == fits, f"{way=}"
        if "first_half" in stack:
            assert any(after < before for before, after in watch.widths), "no pass became narrower"
        if "num_pages" in way:
            assert engine.scheduler.num_preemptions


@pytest.mark.sweep
@pytest.mark.parametrize("stack", [TOY_STACKS[2], FOCUS[1]], ids=str)
def test_aborts_and_new_prompts_while_sequences_wait(
    toys: dict[str, Path],
    answers_alone: Any,
    monkeypatch: pytest.MonkeyPatch,
    stack: dict[str, Any],
) -> None:
    expected = answers_alone(stack)
    watch = Watch(monkeypatch)
    force(monkeypatch, TIGHT)
    engine = engine_of(toys, accelerators=stack, num_pages=40, max_num_seqs=5, graphs="on")
    done: dict[str, Completion] = {}
    numbers = [f"{round_}-{number}" for round_ in range(3) for number in range(len(PROMPTS))]
    for step in itertools.count():
        if step % 2 == 0 and numbers:
            name = numbers.pop(0)
            number = int(name.split("-")[1])
            engine.add_request(name, PROMPTS[number], PARAMS[number])
        if step in (5, 9, 21):
            engine.abort(f"0-{step % 3}")
        done |= {e.request_id: e.completion for e in engine.step() if e.completion is not None}
        if not numbers and not engine.has_work:
            break
    assert_idle(engine)
    assert sum(watch.num_waiting) > 20
    for name, completion in done.items():
        if completion.finish_reason != "abort":
            assert completion.token_ids == expected[int(name.split("-")[1])]


class Forbidden(TorchDispatchMode):
    """Refuses operations that wait for the device, or whose result's shape depends on what tensors hold."""

    NAMES = ("nonzero", "_local_scalar_dense", "masked_select", "_unique", "unique")
    OVERLOADS = ("repeat_interleave.Tensor", "repeat_interleave.self_Tensor")

    def __init__(self) -> None:
        super().__init__()
        self.num_seen, self.is_off = 0, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.is_off:
            self.num_seen += 1
            name = func.overloadpacket.__name__
            is_bad = name.startswith(self.NAMES) or str(func).endswith(self.OVERLOADS)
            assert not is_bad, f"{func} in a sparse pass"
            if name.startswith("index") and len(args) > 1 and isinstance(args[1], (list, tuple)):
                found = [each for each in args[1] if isinstance(each, Tensor)]
                assert all(each.dtype not in (torch.bool, torch.uint8) for each in found), (
                    f"{func} by booleans"
                )
        return func(*args, **(kwargs or {}))

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        """For exact attention and the store of keys on a CPU, whose kernels on a GPU do not wait."""
        before, self.is_off = self.is_off, True
        yield
        self.is_off = before


STATIC: list[dict[str, Any]] = [
    *({name: THIN.get(name, {}) for name in stack} for stack in STACKS if len(stack) == 1),
    *TOY_STACKS[2:4],
    FOCUS[1],
]


@pytest.mark.sweep_but("exact")
@pytest.mark.parametrize("stack", STATIC, ids=lambda stack: "+".join(stack))
def test_no_operation_of_a_pass_waits_or_has_a_shape_of_its_contents(
    toys: dict[str, Path], monkeypatch: pytest.MonkeyPatch, stack: dict[str, Any]
) -> None:
    assert all(ACCELERATORS.get(name).is_static for name in stack)
    guard, passes = Forbidden(), 0
    forward = Runner.forward

    def guarded(runner: Runner, plan: Any) -> Any:
        nonlocal passes
        passes += 1
        with guard:
            wanted = forward(runner, plan)
            wanted.logits()
            return wanted

    def unwatched(method: Any) -> Any:
        def called(*given: Any, **named: Any) -> Any:
            with guard.off():
                return method(*given, **named)

        return called

    monkeypatch.setattr(Runner, "forward", guarded)
    monkeypatch.setattr(Runner, "_plan_attention", unwatched(Runner._plan_attention))
    monkeypatch.setattr(KVCache, "attend", unwatched(KVCache.attend))
    monkeypatch.setattr(dense, "qkv_rope_cache", unwatched(dense.qkv_rope_cache))
    engine: Engine = engine_of(toys, accelerators=stack, graphs="on")
    engine.generate(PROMPTS[:4], PARAMS[:4])
    assert passes > 10
    assert guard.num_seen > 100 * passes


@pytest.mark.parametrize(
    "fault",
    [
        lambda x: x.nonzero(),
        lambda x: x[x > 1],
        lambda x: int(x.max()),
        lambda x: bool((x > 1).any()),
        lambda x: x.clone().__setitem__(x > 2, x[:1]),
        lambda x: x.repeat_interleave(x),
    ],
)
def test_what_waits_is_found(fault: Any) -> None:
    with pytest.raises(AssertionError), Forbidden():
        fault(torch.arange(4))


def test_flagged_rows_are_counted_in_order() -> None:
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        is_flagged_R = torch.rand(9, generator=generator) < 0.5
        right = is_flagged_R.nonzero()[:, 0].tolist()
        for capacity in range(1, 12):
            found = flagged(is_flagged_R, capacity).tolist()
            assert found == (right + [9] * capacity)[:capacity]


@pytest.mark.sweep
def test_a_clean_block_that_waits_is_not_shared(
    toys: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results are read late, so the device stores blocks that the host has not scheduled; where such a block
    does not fit, the prefix cache must not offer its pages. New prompts go on behind blocks that were just
    emitted."""
    num_unscheduled = 0
    finish = SparseKV.finish

    def watched(kv: SparseKV) -> Any:
        nonlocal num_unscheduled
        result = finish(kv)
        plan, active = kv.view.plan, kv.view.active
        assert active.num_scheduled_B is not None
        num_unscheduled += int((kv.view.waits_B & (plan.num_feed_B > active.num_scheduled_B)).sum())
        return result

    monkeypatch.setattr(SparseKV, "finish", watched)
    # As on a GPU, several results are read at once at times.
    chance = random.Random(0)
    monkeypatch.setattr(InflightStep, "is_ready", lambda _: chance.random() < 0.5)
    ways: dict[str, Any] = {"graphs": "on", "num_inflight_steps": 4, "max_num_seqs": 16, "page_size": SIZE}
    force(monkeypatch, TIGHT)
    engine = engine_of(toys, accelerators=HALF, **ways)
    params = greedy(max_tokens=24)
    prompts = {str(number): prompt for number, prompt in enumerate(PROMPTS)}
    answers: dict[str, list[int]] = {name: [] for name in prompts}
    for name, prompt in prompts.items():
        engine.add_request(name, prompt, params)
    done: dict[str, tuple[int, ...]] = {}
    num_cached = 0
    while engine.has_work:
        for event in engine.step():
            answers[event.request_id] += event.token_ids
            if event.completion is not None:
                done[event.request_id] = event.completion.token_ids
                num_cached += event.completion.num_cached_tokens
            elif len(prompts) < 40:
                name = str(len(prompts))
                prompts[name] = [*prompts[event.request_id], *answers[event.request_id], *range(SIZE + 1)]
                answers[name] = []
                engine.add_request(name, prompts[name], params)
    assert_idle(engine)
    assert num_unscheduled > 3
    assert num_cached > 100
    alone = engine_of(toys, accelerators={"first_half": {}}, prefix_cache=False)
    found = alone.generate(list(prompts.values()), params)
    assert [done[name] for name in prompts] == tokens(found)
