"""A pass that fails is as if it had never begun, wherever it fails: no answer changes and nothing leaks."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from idlm.contracts import Completion, SamplingParams
from idlm.infer.engine import Engine
from tests.contracts.block.blocks import write_block_toy
from tests.errors import refused

TINY = Path(__file__).resolve().parents[2] / "recipes" / "assets" / "tiny_ar"
FAULTS = (
    ("table", "admit", True),
    ("decoder", "plan", False),
    ("_parts.runner", "forward", False),
    ("decoder", "advance", True),
    ("decoder", "advance", False),
    ("table", "commit", False),
)
"""(part of the engine, its method, whether it fails before its work or after)."""
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
SURVIVOR, VICTIM, EARLIER = [5, 6, 7, 8], [9, 9, 10], [3] * 20


def _engine(decoder: str, directory: Path = TINY) -> Engine:
    options = {"stride": 3, "mask_token_id": 170} if decoder == "isd" else {}
    return Engine.from_pretrained(
        directory, decoder, device="cpu", dtype="float32", max_num_seqs=3, max_length=64, **options
    )


def _fail_once(monkeypatch: pytest.MonkeyPatch, owner: type, name: str, *, before: bool) -> None:
    """The next call of `owner.name` raises KeyboardInterrupt, before or after its work."""
    call: Callable[..., Any] = getattr(owner, name)

    def failing(*args: Any, **options: Any) -> Any:
        monkeypatch.setattr(owner, name, call)
        if not before:
            call(*args, **options)
        raise KeyboardInterrupt

    monkeypatch.setattr(owner, name, failing)


def _drain(engine: Engine) -> dict[str, Completion]:
    done = {}
    for _ in range(60):
        for event in engine.step():
            if event.completion is not None:
                done[event.request_id] = event.completion
    return done


@pytest.mark.sweep_but("ar")
@pytest.mark.filterwarnings("ignore:stride 3")
@pytest.mark.parametrize("decoder", ["ar", "isd", "block"])
def test_others_answer_as_if_it_had_not_happened(
    monkeypatch: pytest.MonkeyPatch, decoder: str, tmp_path: Path
) -> None:
    engine = _engine(decoder, write_block_toy(tmp_path, shifted=False) if decoder == "block" else TINY)
    [expected, *_] = engine.generate([SURVIVOR, EARLIER, EARLIER], GREEDY)
    # Decoder `block` commits in its own op.
    faults = FAULTS[:-1] if decoder == "block" else FAULTS
    for passes_before, (part, name, before) in itertools.product((0, 2), faults):
        engine.add_request("survivor", SURVIVOR, GREEDY)
        for _ in range(passes_before):
            engine.step()
        _fail_once(monkeypatch, type(operator.attrgetter(part)(engine)), name, before=before)
        with pytest.raises(KeyboardInterrupt):
            engine.generate([VICTIM], GREEDY)
        done = _drain(engine)
        assert done["survivor"].token_ids == expected.token_ids, f"{part=} {name=} {passes_before=}"
        assert set(done) == {"survivor"}
        assert engine.pool.num_free == engine.pool.num_pages
        assert not engine._active


def test_an_id_whose_answer_was_not_read_stays_in_use() -> None:
    engine = _engine("isd")
    engine.add_request("a", SURVIVOR, GREEDY)
    engine.generate([VICTIM], SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
    refused("IDLM-0409", engine.generate, [EARLIER], GREEDY, request_ids=["a"])
    assert _drain(engine)["a"].num_prompt_tokens == len(SURVIVOR)
    refused("IDLM-0409", engine.generate, [EARLIER, VICTIM], GREEDY, request_ids=["b", "b"])
    [again] = engine.generate([EARLIER], GREEDY, request_ids=["a"])
    assert again.num_prompt_tokens == len(EARLIER)


def test_a_vanishing_temperature_is_greedy() -> None:
    [greedy] = _engine("ar").generate([SURVIVOR], GREEDY)
    for temperature in (1e-4, 1e-310, 5e-324):
        params = SamplingParams(temperature=temperature, seed=1, max_tokens=12, ignore_eos=True)
        [drawn] = _engine("ar").generate([SURVIVOR], params)
        assert drawn.token_ids == greedy.token_ids
