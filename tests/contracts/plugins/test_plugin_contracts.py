"""A decoder and a memory manager of a new kind are one file each: full diffusion, whose passes compute all KV
anew, with canvases of different lengths, and a manager that divides the head of a pass into slices.

The toys are in `toys/`; a slow reference decodes the same canvases with dense attention by transformers.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from idlm.contracts import Completion, SamplingParams
from idlm.errors import UserError
from idlm.infer.decoders.base import DECODERS, choose_decoder
from idlm.infer.engine import Engine
from idlm.infer.evaluation.arms import choose_baseline
from idlm.infer.memory.base import MEMORY_MANAGERS
from idlm.infer.state.batch import WantedRows
from idlm.kernels.sampling import uniforms
from idlm.semantics import Semantics
from tests.contracts.engines import MASK_ID, Shortage, assert_idle, build_engine, prompts_of
from tests.contracts.plugins.plugged_in import plugged_in
from tests.margins import DRAW_MARGIN, assert_apart, assert_gap, assert_same_rows
from tests.prefix_simulation import check_pages
from tests.toy import write_toy_checkpoint

TOYS = Path(__file__).parent / "toys"
MEANING = Semantics(causality="full", logit_shift=False, mask_token_id=MASK_ID)
PER_PASS = 3
PROMPTS = prompts_of([1, 7, 20, 3, 12, 5])
LENGTHS = (10, 4, 13, 1, 7, 24)
PARAMS = [
    SamplingParams(temperature=0.8 * (k % 2), seed=k, max_tokens=length) for k, length in enumerate(LENGTHS)
]


@pytest.fixture(scope="module", autouse=True)
def toys() -> Iterator[None]:
    with (
        plugged_in(DECODERS, TOYS / "decoders") as decoders,
        plugged_in(MEMORY_MANAGERS, TOYS / "memory") as managers,
    ):
        assert (decoders, managers) == (["toy_full"], ["toy_chunks"])
        yield


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = write_toy_checkpoint(tmp_path_factory.mktemp("full"), seed=3)
    MEANING.save(directory)
    return directory


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list[tuple[int, ...]]:
    slow = SlowCanvas(checkpoint)
    return [slow.answer(prompt, params) for prompt, params in zip(PROMPTS, PARAMS, strict=True)]


class SlowCanvas:
    """One canvas at a time, dense attention, plain Python."""

    def __init__(self, directory: Path) -> None:
        import transformers

        self.model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32, attn_implementation="eager"
        ).eval()

    def answer(self, prompt: list[int], params: SamplingParams) -> tuple[int, ...]:
        canvas: list[int | None] = [*prompt, *[None] * params.max_tokens]
        step = 0
        while None in canvas:
            assert params.seed is not None
            stream = (torch.tensor([number]) for number in (params.seed, 0, step))
            numbers = uniforms(*stream, len(canvas))[0].tolist()
            probs_LV = self._logits([MASK_ID if token is None else token for token in canvas])
            found = {
                index: self._draw(probs_LV[index], params.temperature, numbers[index])
                for index, token in enumerate(canvas)
                if token is None
            }
            assert_gap([confidence for _, confidence in found.values()], PER_PASS)
            surest = sorted(found, key=lambda index: -found[index][1])[:PER_PASS]
            for index in surest:
                canvas[index] = found[index][0]
            step += 1
        return tuple(token for token in canvas[len(prompt) :] if token is not None)

    @torch.no_grad()
    def _logits(self, ids: list[int]) -> torch.Tensor:
        everything = torch.zeros(1, 1, len(ids), len(ids))
        logits_LV = self.model(input_ids=torch.tensor([ids]), attention_mask=everything).logits[0].double()
        logits_LV[:, MASK_ID] = -1e30
        return logits_LV

    def _draw(self, logits_V: torch.Tensor, temperature: float, number: float) -> tuple[int, float]:
        """A token and its probability, at temperature 1 if it is the most likely one."""
        if temperature == 0:
            assert_gap(logits_V.tolist())
            token = int(logits_V.argmax())
            return token, float(logits_V.softmax(0)[token])
        probs_V = (logits_V / temperature).softmax(0)
        borders = probs_V.cumsum(0)
        for border in borders.tolist()[:-1]:
            assert_apart(number, border, margin=DRAW_MARGIN)
        token = int((borders < number).sum())
        return token, float(probs_V[token])


def _engine(checkpoint: Path, **options: Any) -> Engine:
    return build_engine(checkpoint, None, per_pass=PER_PASS, **{"max_num_batched_tokens": 400, **options})


def _add(engine: Engine) -> None:
    for number, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
        engine.add_request(str(number), prompt, params)


def _step(engine: Engine) -> dict[str, Completion]:
    events = engine.step()
    check_pages(engine.pool)
    return {event.request_id: event.completion for event in events if event.completion is not None}


def _drain(engine: Engine, done: dict[str, Completion]) -> dict[str, Completion]:
    """The answers `done` and all that are to come."""
    while engine.has_work:
        done = done | _step(engine)
    return done


def test_alone_it_equals_the_slow_decoding(checkpoint: Path, expected: list[tuple[int, ...]]) -> None:
    engine = _engine(checkpoint)
    assert engine.decoder.name == "toy_full"
    for prompt, params, tokens in zip(PROMPTS, PARAMS, expected, strict=True):
        [found] = engine.generate([prompt], params)
        assert found.token_ids == tokens
        assert found.num_forwards == -(-params.max_tokens // PER_PASS)
        assert found.exactness == "exact"
    assert_idle(engine)


@pytest.mark.sweep_but(options={})
@pytest.mark.sweep_but(options={"graphs": "on"})
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"graphs": "on"},
        {"graphs": "on", "num_inflight_steps": 3, "max_num_seqs": 3},
        {"num_inflight_steps": 2},
        {"max_num_batched_tokens": 30},
        {"num_pages": 14},
        {"memory": "toy_chunks"},
        {"memory": "toy_chunks", "graphs": "on", "page_size": 16},
    ],
    ids=str,
)
def test_mixed_canvases_equal_those_alone(
    checkpoint: Path, expected: list[tuple[int, ...]], options: dict[str, Any]
) -> None:
    """Static shapes, late results, few rows per pass, few pages, and a head in slices change nothing."""
    engine = _engine(checkpoint, **options)
    found = engine.generate(PROMPTS, PARAMS)
    assert [answer.token_ids for answer in found] == expected
    assert_idle(engine)


def test_a_stop_token_ends_the_answer(checkpoint: Path, expected: list[tuple[int, ...]]) -> None:
    stop = expected[2][6]
    params = SamplingParams(temperature=0, seed=2, max_tokens=LENGTHS[2], stop_token_ids=(stop,))
    [found] = _engine(checkpoint).generate([PROMPTS[2]], params)
    assert found.finish_reason == "stop"
    assert found.token_ids == expected[2][: expected[2].index(stop) + 1]


@pytest.mark.parametrize("options", [{}, {"graphs": "on", "num_inflight_steps": 2}], ids=str)
def test_aborts_leave_the_others_alone(
    checkpoint: Path, expected: list[tuple[int, ...]], options: dict[str, Any]
) -> None:
    engine = _engine(checkpoint, max_num_seqs=3, **options)
    _add(engine)
    done = _step(engine)
    for number in (0, 4):
        assert [done.finish_reason for done in engine.abort(str(number))] == ["abort"]
    found = _drain(engine, done)
    assert {name: answer.token_ids for name, answer in found.items()} == {
        str(number): expected[number] for number in (1, 2, 3, 5)
    }
    assert_idle(engine)


@pytest.mark.parametrize("number", range(1, 200, 40))
def test_a_pass_that_runs_out_of_memory_begins_anew(
    checkpoint: Path, expected: list[tuple[int, ...]], number: int
) -> None:
    """All requests lose lanes and pages, and their canvases begin anew, with the same outcome."""
    engine = _engine(checkpoint, max_num_seqs=4, num_pages=24)
    _add(engine)
    done = _step(engine)
    with Shortage("cpu", {number}) as shortage:
        done |= _step(engine)
        assert shortage.is_over
    found = _drain(engine, done)
    assert [found[str(name)].token_ids for name in range(len(PROMPTS))] == expected
    assert_idle(engine)


def test_a_preempted_canvas_is_resumed(checkpoint: Path, expected: list[tuple[int, ...]]) -> None:
    """A canvas has all its pages from the start, so only a test can take them away."""
    engine = _engine(checkpoint)
    _add(engine)
    done = _step(engine)
    for victim in engine.scheduler.running[2:]:
        assert victim.lane is not None
        engine.pool.release(victim.lane)
    found = _drain(engine, done)
    assert [found[str(name)].token_ids for name in range(len(PROMPTS))] == expected
    assert_idle(engine)


def test_a_canvas_takes_one_layer_and_its_own_rows(checkpoint: Path) -> None:
    """The pool counts rows of canvases; no prefix cache, and the ordinary page size."""
    engine = _engine(checkpoint, page_size=None, max_num_seqs=2, max_length=64)
    cache = engine._parts.runner._cache
    assert engine._parts.model.spec.num_layers == 2
    assert cache.keys.shape[:2] == (1, engine.pool.num_pages * 16)
    assert engine.pool.cache is None
    assert engine.pool.num_pages == 2 * 64 // 16
    few_rows = _engine(checkpoint, page_size=None, max_num_seqs=8, max_length=64, max_num_batched_tokens=32)
    assert few_rows.pool.num_pages == (32 + 64) // 16 + 8
    engine.add_request("one", PROMPTS[1], SamplingParams(max_tokens=20))
    engine.step()
    assert engine.pool.num_pages - engine.pool.num_free == 2
    with pytest.raises(UserError, match="IDLM-0413"):
        _engine(checkpoint, num_pages=2).generate([PROMPTS[0]], SamplingParams(max_tokens=20))


def test_what_it_cannot_do_is_refused(checkpoint: Path) -> None:
    engine = _engine(checkpoint)
    with pytest.raises(UserError, match="IDLM-0449"):
        engine.generate([[1]], SamplingParams(logprobs=1))
    with pytest.raises(UserError, match="IDLM-0455"):
        engine.generate([[1]], SamplingParams(tau=0.1))
    with pytest.raises(UserError, match="IDLM-0452"):
        build_engine(checkpoint, "ar")


def test_logits_that_are_not_finite_end_one_answer(checkpoint: Path, expected: list[tuple[int, ...]]) -> None:
    engine = _engine(checkpoint)
    engine._parts.model.trunk.embed.data[46] = torch.nan
    for name, prompt in (("good", PROMPTS[1]), ("bad", [46, 3])):
        engine.add_request(name, prompt, PARAMS[1])
    found = _drain(engine, {})
    assert found["good"].token_ids == expected[1]
    assert found["bad"].error is not None
    assert found["bad"].error.startswith("IDLM-0457")
    assert_idle(engine)


def test_it_is_the_default_and_the_baseline_of_its_checkpoints() -> None:
    assert choose_decoder(None, MEANING).name == "toy_full"
    baseline = choose_baseline("auto", MEANING)
    assert baseline is not None
    assert (baseline.decoder, baseline.options) == ("toy_full", {"per_pass": 1})
    assert choose_decoder(None, Semantics()).name == "ar"


@pytest.mark.parametrize("num_chunks", [1, 2, 3, 7, 50])
def test_slices_of_wanted_rows_join_to_all_of_them(num_chunks: int) -> None:
    """The same bits in fp32."""
    generator = torch.Generator().manual_seed(0)
    hidden_RD, head_VD = (torch.randn(n, 64, generator=generator) for n in (60, 300))
    rows_X = torch.randint(0, 60, (50,), generator=generator)
    sizes: list[int] = []

    def propose(logits_YV: torch.Tensor, rows: slice) -> tuple[torch.Tensor, ...]:
        sizes.append(len(logits_YV))
        return logits_YV, rows_X[rows]

    wanted = WantedRows(hidden_RD, rows_X, lambda x_YD: x_YD @ head_VD.T, num_chunks=lambda *_: num_chunks)
    logits_XV, joined_X = wanted.proposals(propose)
    assert torch.equal(joined_X, rows_X)
    assert max(sizes) == -(-50 // num_chunks)
    assert_same_rows(logits_XV, wanted.logits())
