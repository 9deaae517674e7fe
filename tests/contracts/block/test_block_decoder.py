"""Block diffusion in mixed batches against a slow reference decoder, token for token, with the
log-probabilities of the passes that decided."""

from __future__ import annotations

import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from idlm.contracts import SamplingParams
from idlm.errors import UserError
from idlm.infer.decoders import block
from idlm.infer.decoders.block import BlockConfig, BlockDecoder
from idlm.infer.decoders.block_config import UNMASKINGS, Masks
from idlm.infer.engine import Engine
from idlm.infer.runtime.graphs.pass_shape import shape_of
from idlm.infer.state.batch import Batch, Schedule
from idlm.infer.state.sequence_state import SequenceState
from idlm.semantics import Semantics
from tests.block_reference import Sampling
from tests.contracts.block.blocks import PROMPTS, Slow, assert_answers, params_of, write_block_toy
from tests.contracts.engines import DEVICE, MASK_ID, assert_idle, build_engine, greedy, prompts_of, wanted_of
from tests.errors import refused
from tests.toy import write_toy_checkpoint

pytestmark = pytest.mark.decides

SIZE = 4
STRATEGIES: list[dict[str, Any]] = [
    {"strategy": "low_confidence_dynamic", "threshold": 0.5},
    {"strategy": "sequential"},
    {"strategy": "low_confidence_static", "steps": 3},
    {"strategy": "entropy_bounded", "entropy_bound": 1.5},
]
PARTS = {"threshold": 0.5, "sub_block_size": 2, "dual_cache": True}
EDITS = {"threshold": 0.4, "edit_threshold": 0.2}
WAYS: dict[str, dict[str, Any]] = {
    "late": {"graphs": "on", "num_inflight_steps": 4, "max_num_seqs": 3},
    "plain": {},
    "static": {"graphs": "on"},
    "alone": {"fused_commit": False, "num_inflight_steps": 1, "prefix_cache": False},
    "preempted": {"num_pages": 14, "max_num_seqs": 6, "max_num_batched_tokens": 1, "num_inflight_steps": 4},
}
PAIRS = zip(STRATEGIES, ("plain", "static", "alone", "plain"), strict=True)
CASES = [(False, one, way) for one, last in PAIRS for way in ("late", "preempted", last)]
CASES += [(True, STRATEGIES[0], way) for way in ("late", "plain", "alone")]
CASES += [(True, PARTS, "plain"), (True, {"sub_block_size": 2}, "late"), (False, EDITS, "preempted")]


@pytest.mark.sweep_but(1)
@pytest.mark.sweep_but(shifted=True, way="late")
@pytest.mark.parametrize(("shifted", "options", "way"), CASES, ids=str)
def test_mixed_batches_equal_a_slow_decoder(
    toys: dict[bool, Path], slow: Slow, shifted: bool, options: dict[str, Any], way: str
) -> None:
    """Where logits are shifted, blocks begin with a token of the block before."""
    engine = build_engine(toys[shifted], "block", **options, **WAYS[way])
    params = params_of(scored=way in ("late", "alone", "preempted"))
    found = engine.generate(PROMPTS, params)
    assert_answers(found, slow.answers(options, shifted=shifted))
    for done, one in zip(found, params, strict=True):
        assert (done.logprobs is None) == (one.logprobs is None)
        assert all(len(token.top) == one.logprobs for token in done.logprobs or ())
    assert engine.scheduler.num_preemptions > 0 or way != "preempted"
    assert_idle(engine)


def test_every_strategy_is_compared() -> None:
    assert sorted(options["strategy"] for options in STRATEGIES) == UNMASKINGS.names()


@pytest.mark.parametrize("num_feed", [[0] * 64, [32] * 64, [0] * 60 + [320] * 4, [32]], ids=sum)
def test_rows_of_static_shapes_hold_what_may_be_fed_and_little_more(num_feed: list[int]) -> None:
    """A block that is not stored beside decoding rows takes their place; one that is has rows reserved."""
    num, blocks = len(num_feed), [feed // 32 for feed in num_feed]
    schedule = Schedule(num_feed=num_feed, num_known=[64] * num, samples=[True] * num)
    request = SimpleNamespace(params=SamplingParams(), max_length=64, num_canvases=1, lane=0, grammar=None)
    schedule.requests = [request] * num  # type: ignore[list-item]
    meaning = Semantics(causality="block", logit_shift=False, block_size=32, mask_token_id=MASK_ID)
    shapes = [
        shape_of(schedule, BlockDecoder(BlockConfig(fused_commit=fused_commit), meaning), 64)
        for fused_commit in (True, False)
    ]
    fused, alone = (shape.num_prompt_rows // 32 for shape in shapes)
    beyond = sum(max(0, count - 1) for count in blocks)
    assert alone >= beyond and (alone == 0) == (beyond == 0)
    assert fused >= max(1, num / 8, sum(blocks)) and fused <= 2 * max(1, num / 8, sum(blocks))


@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("name", UNMASKINGS.names())
def test_nothing_looks_at_values(shifted: bool, name: str) -> None:
    """On the meta device there are none: code that waits for one, or makes a shape of one, raises."""
    device, num_sequences = torch.device("meta"), 3
    config = BlockConfig(strategy=name, sub_block_size=2)
    meaning = Semantics(causality="block", logit_shift=shifted, block_size=SIZE, mask_token_id=MASK_ID)
    decoder = BlockDecoder(config, meaning)
    decoder.allocate(8, 64, 48, dtype=torch.float32, device=device)
    table = SequenceState(8, 64, device)
    ints_B = torch.zeros(num_sequences, dtype=torch.int64, device=device)
    batch = Batch(
        lanes_B=ints_B,
        num_feed_B=ints_B,
        samples_B=ints_B > 0,
        max_feed=9,
        max_known=32,
        max_rows=SIZE,
        num_rows=num_sequences * SIZE + 8,
        filters=False,
    )
    plan = decoder.plan(table, batch)
    assert len(plan.token_ids_R) == batch.num_rows
    masks = Masks(
        is_maskable_BW=torch.zeros(num_sequences, SIZE, dtype=torch.bool, device=device),
        confidence_BW=torch.zeros(num_sequences, SIZE, dtype=torch.float64, device=device),
        entropy_BW=torch.zeros(num_sequences, SIZE, dtype=torch.float64, device=device),
        quota_B=ints_B,
        threshold_B=ints_B.double(),
        entropy_bound_B=ints_B.double(),
    )
    assert decoder._strategy.choose(masks).shape == masks.is_maskable_BW.shape
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SequenceState, "probs", lambda *_, **__: None)
        patch.setattr(block, "judged_draws", lambda _, drawn, *__, **___: (drawn.long(), drawn))
        patch.setattr(block, "nonfinite", lambda _, rows_BW: rows_BW.amax(-1))
        patch.setattr(block, "entropy", lambda _: torch.zeros(num_sequences * SIZE, device=device))
        wanted = wanted_of(torch.zeros(num_sequences * SIZE, 48, device=device))
        outcome = decoder.advance(table, batch, plan, wanted)
    assert outcome.token_ids_BJ.shape == (num_sequences, SIZE)


def test_answers_and_passes_do_not_depend_on_the_batch(toys: dict[bool, Path], slow: Slow) -> None:
    expected = slow.answers(STRATEGIES[0])
    for fused in (True, False):
        engine = build_engine(
            toys[False], "block", max_num_batched_tokens=64, fused_commit=fused, **STRATEGIES[0]
        )
        for prompt, params, answer in zip(PROMPTS, params_of(), expected, strict=True):
            [found] = engine.generate([prompt], params)
            assert_answers([found], [answer])
            commits = (len(prompt) + len(found.token_ids) - 1) // SIZE - len(prompt) // SIZE
            commits += len(prompt) >= SIZE
            assert found.num_forwards == answer.num_passes + (0 if fused else commits)


@pytest.mark.sweep_but("True")
@pytest.mark.parametrize("shifted", [False, True])
def test_prompts_of_every_length(toys: dict[bool, Path], slow: Slow, shifted: bool) -> None:
    """One token, exactly one block, one more and one less: greedily, to the end of the next block."""
    prompts, sampling = (
        prompts_of(range(1, 3 * SIZE + 2), seed=9),
        Sampling(temperature=0, max_tokens=SIZE + 1),
    )
    expected = [slow.answer({}, prompt, sampling, shifted=shifted) for prompt in prompts]
    for way in ({}, {"graphs": "on", "num_inflight_steps": 2, "page_size": 16}):
        engine = build_engine(toys[shifted], "block", **way)
        assert_answers(engine.generate(prompts, greedy(max_tokens=SIZE + 1)), expected)


def test_stops_are_trimmed_inside_a_block(toys: dict[bool, Path], slow: Slow) -> None:
    ids = slow.answers(STRATEGIES[1])[0].token_ids
    stop = ids[5]
    engine = build_engine(toys[False], "block", graphs="on", num_inflight_steps=3, **STRATEGIES[1])
    [found] = engine.generate(
        [PROMPTS[0]], SamplingParams(temperature=0, seed=0, max_tokens=12, stop_token_ids=(stop,))
    )
    assert list(found.token_ids) == ids[: ids.index(stop) + 1]
    assert found.finish_reason == "stop"
    assert_idle(engine)


def test_shared_beginnings_are_computed_once_and_change_nothing(toys: dict[bool, Path]) -> None:
    prompt = PROMPTS[-1]
    prompts = [prompt, prompt[:21], [*prompt[:14], *prompt[:5]], prompt]
    plain = build_engine(toys[False], "block", prefix_cache=False).generate(prompts, greedy(max_tokens=9))
    for page_size in (4, 8, 16):
        engine = build_engine(toys[False], "block", page_size=page_size, max_num_seqs=1)
        found = engine.generate(prompts, greedy(max_tokens=9))
        assert [answer.token_ids for answer in found] == [answer.token_ids for answer in plain]
        assert found[-1].num_cached_tokens == 28 // page_size * page_size
        assert_idle(engine)
    # Pages that end inside a block cannot be told by their own tokens.
    with pytest.warns(UserWarning, match=r"page_size=6 ends inside a block of 4.*give page_size=8"):
        engine = Engine.from_pretrained(toys[False], **DEVICE, max_length=64, page_size=6)
    assert engine.pool.cache is None
    found = engine.generate(prompts, greedy(max_tokens=9))
    assert [answer.token_ids for answer in found] == [answer.token_ids for answer in plain]


@pytest.mark.parametrize("shifted", [False, True])
def test_a_cached_prompt_of_whole_blocks_still_has_logits(toys: dict[bool, Path], shifted: bool) -> None:
    """Where logits are shifted, by its last row."""
    prompt = prompts_of([4 * SIZE])[0]
    engine = build_engine(toys[shifted], "block", page_size=SIZE)
    first, again = (engine.generate([prompt], greedy(max_tokens=9))[0] for _ in range(2))
    assert again.num_cached_tokens == 3 * SIZE
    assert again.token_ids == first.token_ids


@pytest.mark.parametrize(("size", "page_size"), [(1, 16), (6, 18), (32, 32)])
def test_pages_hold_whole_blocks_by_default(tmp_path: Path, size: int, page_size: int) -> None:
    directory = write_block_toy(tmp_path, shifted=False, size=size)
    engine = Engine.from_pretrained(directory, **DEVICE, max_length=128, max_num_seqs=1)
    assert (engine.settings.page_size, engine.pool.page_size) == (page_size, page_size)
    prompt = prompts_of([100])[0]
    first, again = (engine.generate([prompt], greedy(max_tokens=3))[0] for _ in range(2))
    assert first.token_ids == again.token_ids
    assert again.num_cached_tokens == 100 // page_size * page_size


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        ({"strategy": "best"}, "IDLM-0102", ("decoder.strategy=best",)),
        ({"steps": 5}, "IDLM-0451", ("decoder.steps=5", "give decoder.steps=4")),
        ({"sub_block_size": 3}, "IDLM-0451", ("allowed: 1, 2, 4", "give decoder.sub_block_size=2")),
        ({"dual_cache": True}, "IDLM-0451", ("allowed: 1, 2", "give decoder.sub_block_size=2")),
        ({"confidence": "modl"}, "IDLM-0416", ("modl", "law", "model")),
        ({"steps": 5, "threshold": 2.0}, "IDLM-0451", ("decoder.steps=4; decoder.threshold=0.9",)),
    ],
    ids=str,
)
def test_bad_options_are_named(
    toys: dict[bool, Path], options: dict[str, Any], code: str, words: tuple[str, ...]
) -> None:
    error = refused(code, build_engine, toys[False], "block", **options)
    assert all(word in str(error) for word in words), str(error)


@pytest.mark.parametrize("strategy", UNMASKINGS.names())
def test_options_that_a_strategy_does_not_read_are_named(toys: dict[bool, Path], strategy: str) -> None:
    values = {"threshold": 0.5, "entropy_bound": 1.0, "steps": 2}
    reads = UNMASKINGS.get(strategy).reads
    with pytest.warns(UserWarning, match="does nothing") as output:
        engine = Engine.from_pretrained(
            toys[False], "block", device="cpu", max_length=64, strategy=strategy, **values
        )
    [text] = [str(warning.message) for warning in output]
    assert [name for name in values if f"decoder.{name}" in text.partition(" does")[0]] == [
        name for name in values if name not in reads
    ]
    for name, value in values.items():
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            engine.check_request("a", [1], SamplingParams(decoder_options={name: value}))
        assert [f"decoder_options.{name} does nothing" in str(w.message) for w in found] == [True] * (
            name not in reads
        )


def test_more_alternatives_than_are_stored_are_refused(toys: dict[bool, Path]) -> None:
    with pytest.raises(UserError, match="IDLM-0449.*stores 20 alternatives"):
        build_engine(toys[False], "block").generate([[1]], SamplingParams(logprobs=21))


def test_relaxed_acceptance_needs_drafts(toys: dict[bool, Path], tmp_path: Path) -> None:
    write_toy_checkpoint(tmp_path)
    for engine in (build_engine(toys[False], "block"), build_engine(tmp_path, "ar")):
        refused(r"IDLM-0455.*tau=0\.5", engine.generate, [[1]], SamplingParams(tau=0.5))
        assert not engine.has_work


def test_block_is_the_default_of_block_checkpoints_and_of_no_other(
    toys: dict[bool, Path], tmp_path: Path
) -> None:
    engine = Engine.from_pretrained(toys[False], device="cpu", max_length=64)
    assert engine.decoder.name == "block"
    refused("IDLM-0449", engine.generate, [[1]], SamplingParams(prompt_logprobs=1))
    for causal in ("ar", "isd"):
        refused("IDLM-0452", build_engine, toys[False], causal)
    write_toy_checkpoint(tmp_path)
    refused("IDLM-0450", build_engine, tmp_path, "block")
