"""Traces of unmasking: files and their refusals, the drawn one, the rows that they imply, and the limit."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.engine.decoding.harness import MODELS
from benchmarks.engine.unmasking.limit import limit_ms
from benchmarks.engine.unmasking.rows import RowCounts, RowRules, rows_of, trace_rows
from benchmarks.engine.unmasking.synthetic import synthetic_trace
from benchmarks.engine.unmasking.trace import FOCUS, FULL, BlockTrace, read_trace, write_trace
from idlm.errors import UserError
from idlm.infer.models.base import FAMILIES
from idlm.infer.models.dense import DenseTrunk
from idlm.infer.models.loader import LoadedModel
from idlm.semantics import Semantics
from tests.focus_reference import BlockState, FocusRules, Selection, budget, fed_places, note

HEAD = {"block_size": 4, "threshold": 0.9, "alpha": 1.5, "source": "by hand"}
BLOCK = {
    "arm": "full",
    "prompt": 0,
    "start": 8,
    "num_fixed": 1,
    "decided": [[1, 3], [2]],
    "deltas": [[1, 0.5, 2], [0]],
}
WHOLE = BLOCK | {"num_fixed": 0, "decided": [[0, 1, 2, 3]], "deltas": [[1, 2, 3, 4]]}


def written(path: Path, *lines: object) -> Path:
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


def test_a_file_holds_what_was_recorded(tmp_path: Path) -> None:
    path = written(tmp_path / "hand.jsonl", HEAD, BLOCK, WHOLE, WHOLE | {"arm": "focus"})
    trace = read_trace(path, 4)
    assert (trace.name, trace.threshold, trace.source) == ("hand", 0.9, "by hand")
    first, second = trace.blocks[FULL]
    assert first.masks(4) == [[1, 2, 3], [2]]
    assert first.decided == ((1, 3), (2,))
    assert trace.whole(FULL) == (second,)
    assert trace.tokens_per_pass(FULL) == 4
    again = tmp_path / "again.jsonl"
    write_trace(replace(trace, name="again"), again)
    assert read_trace(again, 4) == replace(trace, name="again")


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        ({"decided": [[1, 4], [2, 3]]}, r"pass 0 decided places \[4\]"),
        ({"decided": [[0, 1], [2, 3]]}, r"pass 0 decided places \[0\]"),
        ({"decided": [[1, 3], [3]]}, r"pass 1 decided places \[3\]"),
        ({"decided": [[1, 1, 3], [2]]}, r"pass 0 decided places \[1, 1, 3\]"),
        ({"decided": [[1, 3], []]}, "a pass decides one place or more"),
        ({"decided": [[1, 3]], "deltas": [[1, 0.5, 2]]}, r"places \[2\] stay masked"),
        ({"deltas": [[1, 0.5], [0]]}, "pass 0 has 3 masks"),
        ({"deltas": [[1, 0.5, float("nan")], [0]]}, "pass 0 has 3 masks"),
        ({"deltas": [[1, 0.5, 2], [0], [0]]}, "3 lists of deltas"),
        ({"num_fixed": 4}, "num_fixed is 4"),
        ({"num_fixed": True}, "num_fixed=True"),
        ({"arm": "half"}, "arm is 'half'"),
        ({"more": 1}, "expected an object with"),
    ],
)
def test_what_is_wrong_is_refused_with_file_and_line(
    wrong: dict[str, object], expected: str, tmp_path: Path
) -> None:
    path = written(tmp_path / "hand.jsonl", HEAD, WHOLE, BLOCK | wrong)
    with pytest.raises(UserError, match=rf"IDLM-0110.*hand\.jsonl, line 3.*{expected}"):
        read_trace(path, 4)


def test_other_block_sizes_and_broken_files_are_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "hand.jsonl", HEAD, WHOLE)
    with pytest.raises(UserError, match=r"line 1: block_size is 4, the benchmark's is 8"):
        read_trace(path, 8)
    with pytest.raises(UserError, match=r"no block without places of a prompt in arm focus"):
        read_trace(path, 4)
    path.write_text("{]\n")
    with pytest.raises(UserError, match=r"IDLM-0110.*line 1"):
        read_trace(path, 4)


def slow_rows(block: BlockTrace, size: int, rules: FocusRules, *, evicts: bool) -> list[tuple[int, ...]]:
    """Of each pass: rows fed, rows kept, rows of the head; last, what is frozen. By tests/focus_reference."""
    state, left, found = BlockState(), list(range(size)), []
    for decided, values in zip(block.decided, block.deltas, strict=True):
        deltas, fed = dict(zip(left, values, strict=True)), fed_places(state, rules)
        number, _ = budget(state, deltas, left, rules)
        kept = set(fed)
        if evicts and len(left) > number:
            chosen = set(sorted(left, key=lambda place: (-deltas[place], place))[:number])
            kept = chosen | {place - 1 for place in chosen if place - 1 in left} | set(fed) - set(left)
            kept |= {place for place in left if place < max(kept) and place not in state.processed}
        found.append((len(fed), len(kept), len(kept & set(left))))
        selection = Selection(kept=tuple(sorted(kept)), budget=number, limit=size, deltas=deltas)
        note(state, left, selection, len(decided), rules)
        left = [place for place in left if place not in decided]
    return [*found, (len(state.frozen),)]


@pytest.mark.parametrize("stability", ["neighbour", "plain", "off"])
def test_rows_are_those_of_the_slow_reference(stability: str) -> None:
    size = 16
    trace = synthetic_trace(size, num_blocks=12)
    rules = FocusRules(size=size, alpha=trace.alpha, stability=stability)
    slow = [slow_rows(block, size, rules, evicts=True) for block in trace.whole(FOCUS)]
    num_passes = sum(len(one) - 1 for one in slow)
    for commit in ("clean", "unfrozen"):
        rows = trace_rows(trace, FOCUS, commit=commit, stability=stability)
        for column, value in enumerate((rows.fed, rows.kept, rows.head)):
            assert value * num_passes == pytest.approx(sum(each[column] for one in slow for each in one[:-1]))
        num_frozen = sum(one[-1][0] for one in slow) if commit == "unfrozen" else 0
        assert rows.committed * num_passes == pytest.approx(size * len(slow) - num_frozen)
    assert num_passes * rows.tokens == pytest.approx(size * len(slow))


def test_plain_delayed_caches_freeze_earlier() -> None:
    trace = synthetic_trace(16, num_blocks=12)
    fed = [trace_rows(trace, FOCUS, stability=one).fed for one in ("plain", "neighbour", "off")]
    assert fed[0] < fed[1] < fed[2] == 16


def test_a_trace_of_another_arm_is_found_out() -> None:
    """Full blocks decide what FOCUS would have left out."""
    trace = synthetic_trace(16, num_blocks=12)
    with pytest.raises(AssertionError, match="decide rows that are not kept"):
        rows_of(trace.whole(FULL), 16, RowRules(alpha=1.0))


def test_the_drawn_trace_is_as_redundant_as_it_says() -> None:
    trace = synthetic_trace(32)
    full, focus = trace_rows(trace, FULL), trace_rows(trace, FOCUS, commit="unfrozen")
    assert full.kept / full.tokens == pytest.approx(15.0, abs=0.5)
    assert focus.suffix_per_token == pytest.approx(3.25, abs=0.1)
    assert trace.tokens_per_pass(FOCUS) > 0.98 * trace.tokens_per_pass(FULL)
    assert synthetic_trace(8, num_blocks=4) == synthetic_trace(8, num_blocks=4)


def sdar_8b() -> LoadedModel:
    config = {"rms_norm_eps": 1e-6, "rope_theta": 1e6, "hidden_act": "silu", "tie_word_embeddings": False}
    spec = FAMILIES.get("Qwen3ForCausalLM").spec(config | MODELS["qwen3-8b"])
    device = torch.device("meta")
    return LoadedModel(
        trunk=DenseTrunk(spec, device=device, dtype=torch.bfloat16),
        spec=spec,
        local=spec,
        semantics=Semantics(mask_token_id=0, causality="block", block_size=32, logit_shift=False),
        architecture="Qwen3ForCausalLM",
        dtype=torch.bfloat16,
        device=device,
        directory=Path("none"),
    )


@pytest.mark.parametrize(
    ("context", "batch", "paper", "clean"),
    [(1024, 1, 1.0, 1.0), (1024, 32, 3.9, 3.2), (1024, 128, 3.97, 3.24), (4096, 128, 2.81, 2.47)],
)
def test_limits_are_those_of_the_issue(context: int, batch: int, paper: float, clean: float) -> None:
    """Its table: 2.13 tokens a pass, 15.0 rows a token without eviction, 3.12 and 4.12 with it."""
    model = sdar_8b()

    def least(kept: float, *, fed: float = 20, head: float = 4.1, committed: float = 2.13) -> float:
        rows = RowCounts(fed=fed, kept=kept, head=head, tokens=2.13, committed=committed, passes=15)
        return limit_ms(model, rows, batch=batch, slots=context + 32, stream=4.23e12, product=785e12)

    full = least(32, fed=32, head=17)
    assert full / least(3.12 * 2.13, committed=0) == pytest.approx(paper, abs=0.02)
    assert full / least(3.12 * 2.13) == pytest.approx(clean, abs=0.02)
    if (context, batch) == (1024, 128):
        assert full == pytest.approx(85.5, abs=0.1)
