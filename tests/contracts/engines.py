"""What the engine's contract tests share: checkpoints, one of them with often-right drafts, and runs."""

from __future__ import annotations

import atexit
import dataclasses
import functools
import shutil
import tempfile
import warnings
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from idlm.contracts import Completion, SamplingParams
from idlm.infer import build
from idlm.infer.decoders.block import BlockDecoder
from idlm.infer.engine import Engine
from idlm.infer.runtime.graphs import pass_shape as buckets
from idlm.infer.runtime.graphs import warm_up, warm_up_shapes
from idlm.infer.runtime.graphs.cuda_graphs import StaticStep
from idlm.infer.runtime.graphs.pass_shape import PassShape
from idlm.infer.state.batch import DroppedRows, StepPlan, WantedRows
from idlm.semantics import Semantics
from tests.margins import MARGIN, NearTie, assert_gap
from tests.prefix_simulation import check_pages
from tests.toy import write_toy_checkpoint

MASK_ID = 47
MAX_STRIDE = 8
CYCLE = 9
DEVICE: dict[str, object] = {"device": "cpu"}
"""Engine settings of the device that the engines run on."""
NUM_SHAKES = 6


def write_converted_toy(directory: Path, architecture: str = "Qwen3", seed: int = 0) -> Path:
    """A random checkpoint that says it was converted; few of its drafts are right."""
    write_toy_checkpoint(directory, architecture=architecture, seed=seed)
    Semantics(mask_token_id=MASK_ID, stride=MAX_STRIDE).save(directory)
    return directory


def write_foreseeing_toy(directory: Path, architecture: str = "Qwen3", *, num_steps: int = 120) -> Path:
    """A toy taught for seconds to walk a cycle of tokens, behind masks too: its drafts are often right.

    Each process trains it once."""
    shutil.copytree(_foreseeing_toy(architecture, num_steps), directory, dirs_exist_ok=True)
    return directory


@functools.cache
def _foreseeing_toy(architecture: str, num_steps: int) -> Path:
    """Trained on `[tokens, M x 7]` with shifted labels, in plain torch."""
    import transformers

    directory = Path(tempfile.mkdtemp(prefix="idlm-toy-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    write_toy_checkpoint(directory, architecture=architecture, seed=1)
    model = transformers.AutoModelForCausalLM.from_pretrained(directory).float()
    generator = torch.Generator().manual_seed(7)
    torch.manual_seed(7)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 2:
                weight.normal_(std=0.15)
    walk = torch.randperm(CYCLE, generator=generator)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    num_masks = MAX_STRIDE - 1
    for step in range(num_steps):
        num_clean = 1 + int(torch.randint(0, 12, (), generator=generator))
        start_B1 = torch.randint(0, CYCLE, (48, 1), generator=generator)
        tokens_BL = walk[(start_B1 + torch.arange(num_clean + num_masks + 1)) % CYCLE]
        fed_BL = tokens_BL[:, :-1].clone()
        fed_BL[:, num_clean:] = MASK_ID
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * (1 - step / num_steps)
        logits_BLV = model(fed_BL).logits
        torch.nn.functional.cross_entropy(logits_BLV.flatten(0, 1), tokens_BL[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(directory)
    Semantics(mask_token_id=MASK_ID, stride=MAX_STRIDE).save(directory)
    return directory


def build_engine(directory: Path, decoder: str, **options: object) -> Engine:
    """An fp32 engine; small pages and prompt chunks, so that borders are crossed."""
    settings = {
        "dtype": "float32",
        "max_num_seqs": 16,
        "max_length": 128,
        "max_num_batched_tokens": 12,
        "page_size": 4,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Engine.from_pretrained(directory, decoder, **{**settings, **DEVICE, **options})


def prompts_of(lengths: Sequence[int], *, seed: int = 0, vocab_size: int = MASK_ID) -> list[list[int]]:
    """Random prompts of the given lengths."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, vocab_size, (n,), generator=generator).tolist() for n in lengths]


def acceptance_of(completions: Sequence[Completion]) -> float:
    """Accepted over tested drafts."""
    tested = sum(sum(c.tested_by_position) for c in completions)
    return sum(sum(c.accepted_by_position) for c in completions) / max(tested, 1)


def tokens_per_forward(completions: Sequence[Completion]) -> float:
    """Tokens over forwards, all completions together."""
    return sum(len(c.token_ids) for c in completions) / sum(c.num_forwards for c in completions)


def assert_idle(engine: Engine) -> None:
    """Nothing of any request is left behind."""
    check_pages(engine.pool)
    assert engine.pool.num_free == engine.pool.num_pages
    assert not engine.scheduler.running
    assert not engine.scheduler.waiting
    assert sorted(engine.scheduler._free_lanes) == list(range(engine.settings.max_sequences))
    assert not engine._active
    assert engine.step() == []


def drain(engine: Engine) -> dict[str, Completion]:
    """The answers that are still to come; the books are checked after every pass."""
    done: dict[str, Completion] = {}
    while engine.has_work:
        done |= {
            event.request_id: event.completion for event in engine.step() if event.completion is not None
        }
        check_pages(engine.pool)
    return done


def watch_passes(engine: Engine, patch: pytest.MonkeyPatch) -> list[tuple[StepPlan, Tensor]]:
    """The plan and the wanted logits of every pass from now on."""
    forward, passes = engine._parts.runner.forward, list[tuple[StepPlan, Tensor]]()

    def watching(plan: StepPlan) -> WantedRows:
        wanted = forward(plan)
        passes.append((plan, wanted.logits().clone()))
        return wanted

    patch.setattr(engine._parts.runner, "forward", watching)
    return passes


def wanted_of(logits_XV: Tensor, dropped: DroppedRows | None = None) -> WantedRows:
    """Wanted rows with these logits."""
    rows_X = torch.arange(len(logits_XV), device=logits_XV.device)
    return WantedRows(logits_XV, rows_X, lambda hidden_XV: hidden_XV, dropped=dropped)


def clear_answers(
    engine: Engine, prompts: Sequence[Any], params: SamplingParams | Sequence[SamplingParams]
) -> list[Completion]:
    """The answers of an engine on a CPU that others are compared with; a `NearTie` if rounding decides one.

    Random answers need a seed each. Not for `adaptive` strides, which follow the clock."""
    if isinstance(engine.decoder, BlockDecoder):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine.decoder, "advance", _Shaking(engine.decoder))
            return engine.generate(prompts, params)
    found, is_clear = answers_and_margins(engine, prompts, params)
    if not all(is_clear):
        unclear = [number for number, clear in enumerate(is_clear) if not clear]
        raise NearTie(f"a choice of each of the answers {unclear} changes if logits move by {MARGIN}")
    return found


def answers_and_margins(
    engine: Engine, prompts: Sequence[Any], params: SamplingParams | Sequence[SamplingParams]
) -> tuple[list[Completion], list[bool]]:
    """Answers, and of each: do logits that move by about `MARGIN` leave it as it is?

    Greedy answers of decoder `ar` are judged by their logprobs. Others are given twice more, on a CPU, with
    the same noise on the logits in opposite directions: one of them reverses a tie."""
    own = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
    if engine.decoder.name == "ar" and all(one.temperature == 0 for one in own):
        shown = [dataclasses.replace(one, logprobs=max(2, one.logprobs or 0)) for one in own]
        found = engine.generate(prompts, shown)
        return found, [_has_gaps(completion) for completion in found]
    found = engine.generate(prompts, own)
    advance, is_clear = engine.decoder.advance, [True] * len(found)
    for size in (MARGIN, -MARGIN):
        generator = torch.Generator().manual_seed(0)

        def moved(
            table: Any, batch: Any, plan: Any, wanted: WantedRows, size: float = size, noise: Any = generator
        ) -> Any:
            logits_XV = wanted.logits()
            noise_XV = torch.randn(logits_XV.shape, generator=noise)
            return advance(table, batch, plan, wanted_of(logits_XV + size * noise_XV, wanted.dropped))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine.decoder, "advance", moved)
            others = engine.generate(prompts, own)
        for number, (mine, other) in enumerate(zip(found, others, strict=True)):
            is_clear[number] &= _decided(mine) == _decided(other)
    return found, is_clear


def _has_gaps(completion: Completion) -> bool:
    try:
        for token in completion.logprobs or ():
            assert_gap(list(token.top.values()))
    except NearTie:
        return False
    return True


def _decided(completion: Completion) -> tuple[Any, ...]:
    return (completion.token_ids, completion.tested_by_position, completion.accepted_by_position)


class _Shaking:
    """`BlockDecoder.advance`, computed first with logits that are moved by `MARGIN` up or down: each time the
    pass must decide the same. The state of the lanes is put back every time."""

    def __init__(self, decoder: BlockDecoder) -> None:
        self._decoder, self._advance = decoder, decoder.advance
        self._generator = torch.Generator().manual_seed(0)

    def __call__(self, table: Any, batch: Any, plan: Any, wanted: WantedRows) -> Any:
        logits_XV = wanted.logits()
        state = list(self._decoder.blocks)
        resizing = self._decoder._resizing
        if resizing is not None:
            state += [resizing.is_new_ZW, resizing.num_late_Z]
        # The last column takes what belongs nowhere.
        state += [table.tokens_ZL[:, :-1], table.num_known_Z, table.num_computed_Z, table.steps_Z]
        before = [tensor.clone() for tensor in state]
        decided = []
        for _ in range(NUM_SHAKES):
            signs_XV = torch.randint(0, 2, logits_XV.shape, generator=self._generator) * 2 - 1
            self._advance(table, batch, plan, wanted_of(logits_XV + MARGIN * signs_XV, wanted.dropped))
            decided.append([tensor.clone() for tensor in state])
            for tensor, old in zip(state, before, strict=True):
                tensor.copy_(old)
        outcome = self._advance(table, batch, plan, wanted)
        for shaken in decided:
            if not all(map(torch.equal, shaken, state)):
                raise NearTie(f"logits that move by {MARGIN} decide otherwise: {plan.lanes_B=}")
        return outcome


greedy = functools.partial(SamplingParams, temperature=0.0, ignore_eos=True)


def answers(completions: Sequence[Completion]) -> list[tuple[tuple[int, ...], str, str]]:
    """What must not depend on the decoder: tokens, reason to stop, text."""
    return [(c.token_ids, c.finish_reason, c.text) for c in completions]


def with_length(params: SamplingParams, max_tokens: int) -> SamplingParams:
    """The same settings, another limit."""
    return dataclasses.replace(params, max_tokens=max_tokens)


class Shortage(TorchDispatchMode):
    """Makes the allocations with these numbers (from 1) fail on `device_type`; can be entered again."""

    def __init__(self, device_type: str, fails_at: Collection[int]) -> None:
        super().__init__()
        self.device_type, self.fails_at = device_type, fails_at
        self.num_seen = self.num_failed = 0

    @property
    def is_over(self) -> bool:
        """Whether all of these allocations have failed."""
        return self.num_failed == len(self.fails_at)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        is_new = all(one.alias_info is None for one in func._schema.returns)
        if is_new and isinstance(result, Tensor) and result.device.type == self.device_type:
            self.num_seen += 1
            if self.num_seen in self.fails_at:
                self.num_failed += 1
                raise torch.OutOfMemoryError(f"allocation {self.num_seen} fails on purpose")
        return result


PER_ROW = 1e-4
"""Seconds per row of the clock that stands for the GPU's."""


class _Graph:
    """What stands for a captured graph."""

    def __init__(self, step: StaticStep, shape: PassShape) -> None:
        self.graph, self.columns = self, None
        self.result: Any = None
        self.fed: Any = None
        self.columns_3B: Tensor = step._no_sequences(shape)
        self._step, self._shape = step, shape

    def replay(self) -> None:
        """Run the pass of the shape on the columns as they are now."""
        batch = self._step._batch(self._shape, self.columns_3B)
        if self._shape.decides:
            self.result = self._step._step(batch)
        else:
            self.fed = self._step._step.feed(batch)


class Stream:
    """What stands for a stream; other code names the class in annotations."""

    def __init__(self, device: torch.device) -> None:
        del device

    def wait_stream(self, other: Stream) -> None:
        """Nothing runs beside the host."""


def simulate_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Capture graphs on a CPU too."""

    def capture(self: StaticStep, shape: PassShape, **_: Any) -> _Graph:
        graph = _Graph(self, shape)
        graph.replay()
        return graph

    def step_of(settings: Any, model: Any, step: Any) -> StaticStep:
        rows = warm_up.eager_rows(model)
        return StaticStep(step, spare_lane=settings.max_sequences, captures=True, eager_rows=rows)

    monkeypatch.setattr(StaticStep, "_capture", capture)
    monkeypatch.setattr(StaticStep, "seconds", lambda _, shape: 1e-3 + PER_ROW * shape.all_rows)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(build, "_step", step_of)
    # A model this small would have graphs of passes with any number of rows.
    monkeypatch.setattr(warm_up_shapes, "PROMPT_GRAPHS", (buckets.PROMPT_STEP,))
