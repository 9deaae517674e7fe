"""The benchmark of mixed traffic, tiny and on a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.results import read_rows
from benchmarks.serving import serve, structured_host, structured_load
from idlm.errors import UserError
from idlm.infer.engine import Engine
from idlm.infer.runtime.stride_controller import StrideController
from idlm.semantics import Semantics

NUM_MODES = 8
"""Of ISD at stride 4."""
SMALL = ["model=tiny", "device=cpu", "dtype=float32", "concurrency=4,2", "requests=6"]


def test_both_decoders_answer_the_load_and_leave_rows(tmp_path: Path) -> None:
    arguments = [*SMALL, "parts=mixed,regret", f"path={tmp_path / 'toy'}", f"results={tmp_path}"]
    assert serve.measure(arguments) == 0
    rows = read_rows("serve", results=tmp_path)
    rates = [row for row in rows if row["metric"] == "output_tokens_per_s"]
    assert [(row["case"]["decoder"], row["case"]["concurrency"]) for row in rates] == [
        ("ar", 4),
        ("ar", 2),
        ("isd", 4),
        ("isd", 2),
    ]
    assert [row["case"]["start"] for row in rates] == ["cold", "warm"] * 2
    assert all(row["gate_passed"] for row in rates)
    metrics = {row["metric"] for row in rows}
    assert metrics >= {"isd_over_ar", "graphs_captured_in_traffic", "ready_s", "controller_regret"}


def test_regret_compares_arms_at_the_same_places_of_the_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A controller that always takes mode 7, `branch`, emits what mode 7 does, in every round."""
    found: list[tuple[int, float]] = []
    timed = serve._timed

    def recorded(engine: Engine, num_passes: int) -> tuple[int, float]:
        tokens, _ = timed(engine, num_passes)
        found.append((tokens, float(num_passes)))
        return found[-1]

    monkeypatch.setattr(serve, "_timed", recorded)
    monkeypatch.setattr(StrideController, "choose", lambda *_: 7)
    arguments = ["decoders=isd", "parts=regret", "concurrency=2", f"results={tmp_path}"]
    assert serve.measure([*SMALL, *arguments]) == 0
    turns = found[2::2]
    assert len(turns) == serve.REGRET_ROUNDS * (1 + NUM_MODES)
    rounds = [turns[start : start + 1 + NUM_MODES] for start in range(0, len(turns), 1 + NUM_MODES)]
    assert all(own == fixed[7] for own, *fixed in rounds)
    assert all(fixed[0][0] < own[0] for own, *fixed in rounds), "AR emits less"
    [row] = read_rows("serve", results=tmp_path)[-1:]
    assert row["metric"] == "controller_regret" and row["value"] == 0


def test_structured_output_is_compared_with_free_answers(tmp_path: Path) -> None:
    arguments = ["decoders=isd", "parts=structured", "concurrency=2", f"results={tmp_path}"]
    assert serve.measure([*SMALL, *arguments]) == 0
    rows = read_rows("serve", results=tmp_path)
    [ratio] = [row for row in rows if row["metric"] == "structured_over_unconstrained"]
    assert ratio["value"] > 0 and ratio["gate_passed"] and ratio["case"]["concurrency"] == 2
    loads = [row["case"]["load"] for row in rows if row["metric"] == "output_tokens_per_s"]
    assert loads == ["free", "structured"]
    times = {row["metric"]: row["value"] for row in rows if row["case"].get("load") == "structured"}
    assert times["decide_ms"] > times["bits_ms"] > 0 and times["choice_ms"] > 0
    free = {row["metric"] for row in rows if row["case"].get("load") == "free"}
    assert not free & {"decide_ms", "bits_ms", "choice_ms", "wait_ms"}
    [drafted, undrafted] = [row["value"] for row in rows if row["metric"] == "tokens_per_forward"]
    assert drafted == pytest.approx(undrafted, rel=0.1)


def test_a_checkpoint_of_other_parts_gets_a_vocabulary_for_structured_output(tmp_path: Path) -> None:
    path = tmp_path / "toy"
    arguments = [*SMALL, f"path={path}", f"results={tmp_path}", "decoders=isd"]
    assert serve.measure([*arguments, "parts=mixed"]) == 0
    assert not (path / "tokenizer.json").exists()
    assert serve.measure([*arguments, "parts=structured"]) == 0
    [first, second] = [
        row["value"]
        for row in read_rows("serve", results=tmp_path)
        if row["metric"].startswith("structured_o")
    ]
    assert first > 0 and second > 0


def test_a_tokenizer_stays_and_none_is_made_up_for_another_mask(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 300}')
    Semantics(mask_token_id=7, stride=4).save(tmp_path)
    with pytest.raises(UserError, match="IDLM-0203"):
        structured_load.add_vocabulary(tmp_path)
    (tmp_path / "vocab.json").write_text("{}")
    before = sorted(tmp_path.iterdir())
    structured_load.add_vocabulary(tmp_path)
    assert sorted(tmp_path.iterdir()) == before


def test_a_load_whose_requests_all_fail_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(structured_load, "add_vocabulary", lambda _: None)
    arguments = ["decoders=isd", "parts=structured", "concurrency=2", f"results={tmp_path}"]
    with pytest.raises(UserError, match="IDLM-0108.*made no token: .*IDLM-.*tokenizer"):
        serve.measure([*SMALL, *arguments])


def test_what_grammars_cost_the_host(tmp_path: Path) -> None:
    arguments = ["sequences=1,3", "passes=3", "vocab_size=500", "record=true", f"results={tmp_path}"]
    assert structured_host.measure(arguments) == 0
    rows = read_rows("serve", results=tmp_path)
    assert {row["metric"] for row in rows} == {
        f"{part}_{clock}" for part in ("choice", "bits") for clock in ("ms", "cpu_ms", "lock_ms")
    }
    assert [row["case"]["sequences"] for row in rows] == [1] * 6 + [3] * 6 + [1] * 6 + [3] * 6
    assert all(row["value"] > 0 for row in rows)


def test_all_sorts_of_passes_are_profiled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["decoders=ar", "parts=profile", "concurrency=12", f"results={tmp_path}"]
    assert serve.measure([*SMALL, *arguments]) == 0
    said = capsys.readouterr().out
    assert [name in said for name in ("prompts, C=12", "decoding, C=12", "512 prompt rows, C=12")] == [
        True
    ] * 3


def test_an_unknown_part_is_refused() -> None:
    with pytest.raises(UserError, match="IDLM-0107"):
        serve.measure([*SMALL, "parts=mixd"])


FAKE_VLLM = '''
from types import SimpleNamespace

__version__ = "0.0"
SamplingParams = SimpleNamespace


class LLM:
    """Answers greedily with transformers; what is drawn is nothing."""

    def __init__(self, model, **options):
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=options["dtype"])
        self.llm_engine = SimpleNamespace(engine_core=SimpleNamespace(shutdown=lambda: None))

    def generate(self, prompts, params, use_tqdm):
        answers = [SimpleNamespace(token_ids=self._answer(*pair)) for pair in zip(prompts, params)]
        return [SimpleNamespace(outputs=[answer]) for answer in answers]

    def _answer(self, prompt, params):
        import torch

        ids = list(prompt["prompt_token_ids"])
        if params.temperature:
            return [0] * params.max_tokens
        for _ in range(params.max_tokens):
            ids.append((self.model(torch.tensor([ids])).logits[0, -1].argmax().item() + SHIFT) % 100)
        return ids[-params.max_tokens :]
'''


@pytest.mark.parametrize("is_right", [True, False])
def test_vllm_answers_the_same_loads_and_its_greedy_answers_are_a_gate(
    tmp_path: Path, is_right: bool
) -> None:
    (tmp_path / "vllm.py").write_text(FAKE_VLLM.replace("SHIFT) % 100", "0)" if is_right else "1) % 100"))
    arguments = [
        "decoders=ar",
        "parts=mixed,steady",
        f"vllm={tmp_path}",
        "settings=num_inflight_steps=2,max_num_batched_tokens=512",
    ]
    assert serve.measure([*SMALL, *arguments, f"results={tmp_path}"]) == int(not is_right)
    rows = read_rows("serve", results=tmp_path)
    over = [row for row in rows if row["metric"] == "over_vllm"]
    assert [(row["case"]["load"], row["gate_passed"]) for row in over] == [
        ("mixed", is_right),
        ("steady", is_right),
    ]
    assert all(row["case"]["num_inflight_steps"] == 2 for row in over)
    peers = [row for row in rows if row["case"].get("engine") == "vllm 0.0"]
    assert [row["metric"] for row in peers] == ["ready_s", *["output_tokens_per_s"] * 2]


def test_the_output_of_a_vllm_that_fails_is_shown_and_the_rest_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "vllm.py").write_text("raise RuntimeError('no such GPU')")
    arguments = ["decoders=ar", "parts=mixed", f"vllm={tmp_path}", f"results={tmp_path}"]
    assert serve.measure([*SMALL, *arguments]) == 1
    assert "no such GPU" in capsys.readouterr().out
    assert "itl_p99_over_median" in {row["metric"] for row in read_rows("serve", results=tmp_path)}
