"""Accelerators through the registries: every decoder with every stack, at full budget and thinned; what they
keep against slow references, pass by pass; state that ends with its block.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import idlm.infer.accelerators as package
from idlm.contracts import Completion, SamplingParams, StepPlan
from idlm.errors import UserError
from idlm.infer.accelerators.base import ACCELERATORS, KVPass
from idlm.infer.accelerators.view import PassView
from idlm.infer.decoders.base import DECODERS
from idlm.infer.engine import Engine
from idlm.semantics import Semantics
from tests.accelerator_reference import Rule, SlowLists, SlowMage, SlowQuest
from tests.block_reference import Rules, Sampling
from tests.contracts.engines import MASK_ID, assert_idle, build_engine, prompts_of, write_converted_toy
from tests.ranks import team_engine, team_of_threads
from tests.toy import write_toy_checkpoint

SIZE, NUM_LAYERS = 8, 4
LENGTHS = (16, 1, 5, 24, 43, 19)
PROMPTS = prompts_of(LENGTHS, vocab_size=MASK_ID)
SETTINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0, "max_tokens": 20},
    {"temperature": 1.0, "max_tokens": 17},
    {"temperature": 0.8, "top_k": 9, "max_tokens": 24},
    {"temperature": 0.0, "max_tokens": 13},
    {"temperature": 1.0, "top_p": 0.9, "max_tokens": 20},
    {"temperature": 0.7, "max_tokens": 22},
)
PARAMS = [SamplingParams(seed=seed, ignore_eos=True, **setting) for seed, setting in enumerate(SETTINGS)]
STRATEGY = {"strategy": "low_confidence_static", "steps": 6}
TOGETHER = {"max_prompt_rows": 256, "max_length": 96}
"""Everybody is seated in the first pass: lanes are numbered like prompts."""
THIN: dict[str, dict[str, Any]] = {"mage": {"k": 5}, "quest": {"k": 6, "page": 4}, "sparsed": {"k": 5}}
RULES: dict[str, Any] = {
    "mage": lambda: SlowMage(k=5),
    "quest": lambda: SlowQuest(k=6, page=4),
    "sparsed": lambda: SlowMage(k=5, exact_share=0.2),
}
KINDS = {name: ACCELERATORS.get(name) for name in ACCELERATORS.names()}
SIDES = {side: [name for name, kind in KINDS.items() if kind.side == side] for side in ("rows", "kv")}
STACKS = [(name,) for name in KINDS] + list(itertools.product(SIDES["rows"], SIDES["kv"]))
LOSSY = [name for name, kind in KINDS.items() if kind.exactness == "lossy"]


def exactly(stack: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """The options with which each is exact."""
    return {name: dict(ACCELERATORS.get(name).exact_options) for name in stack}


def thinly(stack: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """Options with which each thins a toy."""
    return {name: THIN.get(name, {}) for name in stack}


@pytest.fixture(scope="module")
def toys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Block-causal checkpoints, logits in place and shifted, and a token-causal one."""
    found = {"causal": write_converted_toy(tmp_path_factory.mktemp("toy"))}
    for name, shifted in (("block", False), ("shifted", True)):
        found[name] = tmp_path_factory.mktemp("toy")
        architecture = "Qwen2" if shifted else "Qwen3"
        write_toy_checkpoint(
            found[name], architecture=architecture, sharpness=6.0, num_layers=NUM_LAYERS, max_positions=128
        )
        meaning = Semantics(causality="block", logit_shift=shifted, block_size=SIZE, mask_token_id=MASK_ID)
        meaning.save(found[name])
    return found


def engine_of(toys: dict[str, Path], kind: str = "block", **options: Any) -> Engine:
    return build_engine(toys[kind], "block", **{**TOGETHER, **STRATEGY, **options})


def tokens(completions: list[Completion]) -> list[tuple[int, ...]]:
    return [completion.token_ids for completion in completions]


def watch_logits(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The logits of every pass from now on."""
    seen: list[Tensor] = []
    forward = engine._parts.runner.forward

    def watched(plan: StepPlan) -> tuple[Tensor, Tensor | None]:
        logits_XV, has_logits_X = forward(plan)
        seen.append(logits_XV.clone())
        return logits_XV, has_logits_X

    monkeypatch.setattr(engine._parts.runner, "forward", watched)
    return seen


Trace = dict[tuple[int, int, int], list[list[int]] | None]


def watch_lists(engine: Engine) -> dict[int, Trace]:
    """What each layer of each pass sees from now on, by lane: block, step and layer, then KV head."""
    seen: dict[int, Trace] = {}
    accelerator = engine._parts.stack.kv
    assert accelerator is not None
    begin = accelerator.begin

    def watched(view: PassView) -> KVPass | None:
        made = begin(view)
        assert made is not None
        select = made.select_kv

        def watched_select(layer: int, q_RNH: Tensor) -> Tensor | None:
            slots_BKC = select(layer, q_RNH)
            for b in view.is_working_B.nonzero()[:, 0].tolist():
                key = int(view.work.starts_B[b]) // SIZE, int(view.work.num_passes_B[b]), layer
                is_exact = slots_BKC is None or not made.thinned_B[b]
                seen.setdefault(int(view.plan.lanes_B[b]), {})[key] = (
                    None
                    if is_exact or slots_BKC is None
                    else [sorted(slots[slots >= 0].tolist()) for slots in slots_BKC[b]]
                )
            return slots_BKC

        made.select_kv = watched_select  # type: ignore[method-assign]
        return made

    accelerator.begin = watched  # type: ignore[method-assign]
    return seen


@pytest.mark.parametrize("stack", STACKS, ids="+".join)
@pytest.mark.parametrize("decoder", DECODERS.names())
def test_at_full_budget_every_stack_is_exact_or_refused(
    toys: dict[str, Path], decoder: str, stack: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, params = PROMPTS[:4], PARAMS[:4]
    kind = "block" if decoder == "block" else "causal"
    plain = build_engine(toys[kind], decoder, **TOGETHER)
    needs = [name for name in stack if ACCELERATORS.get(name).needs_blocks]
    if needs and plain.decoder.feeding.num_pending:
        with pytest.raises(UserError, match="IDLM-0460") as refusal:
            build_engine(toys[kind], decoder, accelerators=exactly(stack))
        assert all(f"{name}: decoder={decoder} has no blocks" in str(refusal.value) for name in needs)
        return
    engine = build_engine(toys[kind], decoder, accelerators=exactly(stack), **TOGETHER)
    expected_logits, logits = watch_logits(plain, monkeypatch), watch_logits(engine, monkeypatch)
    expected, found = plain.generate(prompts, params), engine.generate(prompts, params)
    assert tokens(found) == tokens(expected)
    assert len(logits) == len(expected_logits)
    for mine, theirs in zip(logits, expected_logits, strict=True):
        torch.testing.assert_close(mine, theirs, atol=2e-4, rtol=1e-4)
    is_lossy = any(ACCELERATORS.get(name).exactness == "lossy" for name in stack)
    assert {completion.exactness for completion in found} == {"lossy" if is_lossy else "exact"}
    assert_idle(engine)


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize(
    "decoding",
    [
        {"strategy": "low_confidence_dynamic", "threshold": 0.5, "steps": None},
        {"sub_block_size": 4, "dual_cache": True},
        {"edit_threshold": 0.3, "steps": None, "threshold": 0.3, "strategy": "low_confidence_dynamic"},
        {"kv_cache": "fp8"},
    ],
    ids=str,
)
def test_full_budget_is_exact_however_blocks_are_decoded(
    toys: dict[str, Path], name: str, decoding: dict[str, Any]
) -> None:
    prompts, params = [PROMPTS[0], PROMPTS[2], PROMPTS[3]], PARAMS[:3]
    engine = None
    with contextlib.suppress(UserError):
        engine = engine_of(toys, accelerators=exactly((name,)), **decoding)
    if engine is None:
        with pytest.raises(UserError, match=f"IDLM-0460.*{name}: "):
            engine_of(toys, accelerators=exactly((name,)), **decoding)
        return
    found = engine.generate(prompts, params)
    assert tokens(found) == tokens(engine_of(toys, **decoding).generate(prompts, params))


@pytest.fixture(scope="module")
def slow_answers(toys: dict[str, Path]) -> Any:
    known: dict[tuple[str, str], list[tuple[list[int], Trace, SlowLists]]] = {}

    def answers(kind: str, name: str) -> list[tuple[list[int], Trace, SlowLists]]:
        if (kind, name) not in known:
            slow = SlowLists(toys[kind], rules_of(kind), RULES[name]())
            known[kind, name] = [
                (slow.answer(prompt, Sampling(seed=seed, **setting))[0], slow.trace, slow)
                for seed, (prompt, setting) in enumerate(zip(PROMPTS, SETTINGS, strict=True))
            ]
        return known[kind, name]

    return answers


def rules_of(kind: str) -> Rules:
    return Rules(size=SIZE, mask=MASK_ID, shifted=kind == "shifted", **STRATEGY)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["block", "shifted"])
@pytest.mark.parametrize("name", sorted(RULES))
def test_every_pass_sees_what_the_equations_say(
    toys: dict[str, Path], slow_answers: Any, kind: str, name: str
) -> None:
    engine = engine_of(toys, kind, accelerators={name: THIN[name]}, max_num_seqs=len(PROMPTS))
    traces = watch_lists(engine)
    found = engine.generate(PROMPTS, PARAMS)
    expected = slow_answers(kind, name)
    assert [list(completion.token_ids) for completion in found] == [ids for ids, _, _ in expected]
    for lane, (_, trace, _) in enumerate(expected):
        assert traces[lane] == trace
    exact = engine_of(toys, kind).generate(PROMPTS, PARAMS)
    assert tokens(exact) != tokens(found), "the budget must matter, or nothing was tested"


WAYS: list[dict[str, Any]] = [
    {"max_prompt_rows": 9, "max_num_seqs": 3, "run_ahead": 3},
    {"fused_commit": False, "prefix_cache": False, "page_size": 16},
    {"num_pages": 26, "page_size": 4},
]


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("name", sorted(RULES))
def test_answers_do_not_depend_on_company(
    toys: dict[str, Path], slow_answers: Any, name: str, way: dict[str, Any]
) -> None:
    engine = engine_of(toys, accelerators={name: THIN[name]}, **way)
    found = engine.generate(PROMPTS, PARAMS)
    assert [list(c.token_ids) for c in found] == [ids for ids, _, _ in slow_answers("block", name)]
    assert (engine.scheduler.num_preemptions > 0) == ("num_pages" in way)
    assert_idle(engine)


ABORTS = {3: 0, 7: 2, 20: 4}
"""After so many steps, who."""


def _fail(schedule: object) -> None:
    raise ValueError("lost")


@pytest.mark.parametrize("stack", [stack for stack in STACKS if stack != ("exact",)], ids="+".join)
def test_no_stack_depends_on_company_or_on_who_sat_there_before(
    toys: dict[str, Path], stack: tuple[str, ...]
) -> None:
    expected = tokens(engine_of(toys, accelerators=thinly(stack)).generate(PROMPTS, PARAMS))
    engine = engine_of(toys, accelerators=thinly(stack), num_pages=30, max_num_seqs=4, max_prompt_rows=16)
    done: dict[str, Completion] = {}
    for round_ in range(2):
        for number, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
            engine.add_request(f"{round_}-{number}", prompt, params)
        for step in itertools.count():
            if not engine.has_work:
                break
            if step in ABORTS:
                engine.abort(f"{round_}-{ABORTS[step] + round_}")
            if round_ and step == 4:
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(engine._worker, "launch", _fail)
                    with pytest.raises(ValueError, match="lost"):
                        engine.step()
            done.update({e.request_id: e.completion for e in engine.step() if e.completion is not None})
        assert_idle(engine)
    assert len(done) >= len(PROMPTS)
    assert engine.scheduler.num_preemptions
    for request_id, completion in done.items():
        assert completion.token_ids == expected[int(request_id.split("-")[1])]


@pytest.mark.parametrize("name", [name for name in LOSSY if KINDS[name].shards])
def test_ranks_thin_their_own_heads(toys: dict[str, Path], name: str) -> None:
    settings: dict[str, Any] = {**TOGETHER, **STRATEGY, "accelerators": thinly((name,)), "num_pages": 30}
    expected = tokens(engine_of(toys, **settings).generate(PROMPTS, PARAMS))
    with team_of_threads(2) as team:
        engine = team_engine(team, toys["block"], "block", **settings)
        assert tokens(engine.generate(PROMPTS, PARAMS)) == expected
        engine.close()


def test_exact_goes_with_graphs(toys: dict[str, Path]) -> None:
    engine = engine_of(toys, accelerators="exact", graphs="on")
    assert engine.settings.graphs == "on"
    found = engine.generate(PROMPTS[:3], PARAMS[:3])
    assert tokens(found) == tokens(engine_of(toys).generate(PROMPTS[:3], PARAMS[:3]))


def test_a_lane_seated_again_knows_nothing(toys: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two prompts of one length on one lane, the first aborted in its block: its sets must not be used."""

    def first_lists(forgets: bool) -> list[list[int]] | None:
        engine = engine_of(toys, accelerators={"mage": THIN["mage"]}, max_num_seqs=1)
        if not forgets:
            monkeypatch.setattr(engine._parts.stack.kv, "reset", lambda lanes: None)
        engine.add_request("first", PROMPTS[0], PARAMS[0])
        for _ in range(3):
            engine.step()
        engine.abort("first")
        traces = watch_lists(engine)
        engine.generate([PROMPTS[3][:16]], PARAMS[:1])
        return traces[0][2, 0, NUM_LAYERS - 1]

    assert first_lists(True) is None
    assert first_lists(False) is not None


def test_bounds_are_those_of_stored_keys(toys: dict[str, Path], slow_answers: Any) -> None:
    engine = engine_of(toys, accelerators={"quest": THIN["quest"]}, max_num_seqs=1, prefix_cache=False)
    prompt, params = PROMPTS[4], PARAMS[4]
    engine.generate([prompt], params)
    slow = SlowLists(toys["block"], rules_of("block"), RULES["quest"]())
    slow.answer(prompt, Sampling(seed=4, **SETTINGS[4]))
    num_stored = int(engine.table.num_computed_Z[0])
    assert num_stored >= 48
    quest, cache = engine._parts.stack.kv, engine._parts.runner._cache
    pages = engine.pool.block_table_ZP[0, : num_stored // 4]
    for layer in range(NUM_LAYERS):
        keys_PFKH = cache.keys[layer].view(-1, 4, *cache.keys.shape[2:])[pages]
        expected_PFKH = slow.kv[layer][0][:num_stored].view_as(keys_PFKH)
        torch.testing.assert_close(keys_PFKH, expected_PFKH, atol=1e-4, rtol=1e-4)
        if layer >= 2:
            bounds = quest.bounds  # type: ignore[union-attr]
            assert torch.equal(bounds.least[layer - 2, pages], keys_PFKH.amin(1))
            assert torch.equal(bounds.largest[layer - 2, pages], keys_PFKH.amax(1))


def test_bounds_travel_with_copied_pages(toys: dict[str, Path]) -> None:
    prompt = PROMPTS[4]
    prompts = [prompt, [*prompt[:26], 3, 1], [*prompt[:33], 5], prompt[:40]]
    settings: dict[str, Any] = {
        "page_size": 16,
        "max_num_seqs": 1,
        "accelerators": {"quest": {"k": 8, "page": 8}},
    }
    cached = engine_of(toys, **settings)
    found = cached.generate(prompts, PARAMS[:4])
    assert found[1].num_cached_tokens == 24
    assert found[2].num_cached_tokens == 32
    plain = engine_of(toys, **settings, prefix_cache=False)
    assert tokens(found) == tokens(plain.generate(prompts, PARAMS[:4]))


TOY = """
from dataclasses import dataclass
from typing import ClassVar
import torch
from idlm.infer.accelerators.base import ACCELERATORS, KVAccelerator, KVPass

@dataclass(frozen=True, slots=True, kw_only=True)
class SinkConfig:
    sink: int = 2
    window: int = 3

class SinkPass(KVPass):
    def select_kv(self, layer, q_RNH):
        starts_B1 = self.view.work.starts_B[:, None]
        slots_BS = torch.arange(int(starts_B1.max())).expand(len(starts_B1), -1)
        seen = (slots_BS < starts_B1) & ((slots_BS < 2) | (slots_BS >= starts_B1 - 3))
        return torch.where(seen, slots_BS, -1)[:, None].expand(-1, self.view.cache.keys.shape[2], -1)

@ACCELERATORS.register("sink")
class Sink(KVAccelerator):
    name: ClassVar[str] = "sink"
    Config: ClassVar[type] = SinkConfig
    def begin(self, view):
        return SinkPass(view, thinned_B=view.is_working_B)
"""


class SlowSink:
    def begin(self, block: int, step: int, num_steps: int) -> None:
        pass

    def lists(self, layer: int, q_WNH: Tensor, k_PKH: Tensor) -> list[list[int]]:
        num = len(k_PKH)
        return [[slot for slot in range(num) if slot < 2 or slot >= num - 3]] * k_PKH.shape[1]


@pytest.fixture
def sink(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A new accelerator: one file in the package's folder, nothing else."""
    (tmp_path / "sink.py").write_text(TOY)
    monkeypatch.setattr(package, "__path__", [*package.__path__, str(tmp_path)])
    monkeypatch.setattr(ACCELERATORS, "_is_scanned", False)
    members = dict(ACCELERATORS._members)
    yield "sink"
    ACCELERATORS._members = members
    sys.modules.pop("idlm.infer.accelerators.sink")


def test_a_toy_takes_one_file(toys: dict[str, Path], sink: str) -> None:
    engine = engine_of(toys, accelerators=sink)
    found = engine.generate(PROMPTS, PARAMS)
    rule: Rule = SlowSink()
    slow = SlowLists(toys["block"], rules_of("block"), rule)
    for number, completion in enumerate(found):
        expected, _ = slow.answer(PROMPTS[number], Sampling(seed=number, **SETTINGS[number]))
        assert list(completion.token_ids) == expected
    assert found[0].exactness == "lossy"
    with pytest.raises(UserError, match="sink and mage are both of the kv side"):
        engine_of(toys, accelerators=("sink", "mage"))
    with pytest.raises(UserError, match=r"accelerator\.sink\.sinks is no option of it; did you mean 'sink'"):
        engine_of(toys, accelerators={"sink": {"sinks": 3}})
