"""The benchmarks of serving, tiny and on a CPU: mixed traffic, and how many functions the host calls."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.results import read_rows
from benchmarks.serving import serve

SMALL = ["model=tiny", "device=cpu", "dtype=float32", "concurrency=4,2", "requests=6"]


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


def test_greedy_answers_of_vllm_are_a_gate(tmp_path: Path) -> None:
    (tmp_path / "vllm.py").write_text(FAKE_VLLM.replace("SHIFT) % 100", "1) % 100"))
    arguments = ["concurrency=2", "decoders=ar", "parts=mixed", f"vllm={tmp_path}", f"results={tmp_path}"]
    assert serve.measure([*SMALL, *arguments]) == 1
    [over] = [row for row in read_rows("serve", results=tmp_path) if row["metric"] == "over_vllm"]
    assert over["gate_passed"] is False


def test_vllm_answers_the_same_loads(tmp_path: Path) -> None:
    (tmp_path / "vllm.py").write_text(FAKE_VLLM.replace("SHIFT) % 100", "0)"))
    arguments = ["decoders=ar", "parts=mixed,steady", f"vllm={tmp_path}", "settings=num_inflight_steps=2"]
    assert serve.measure([*SMALL, *arguments, f"results={tmp_path}"]) == 0
    rows = read_rows("serve", results=tmp_path)
    over = [row for row in rows if row["metric"] == "over_vllm"]
    loads = [("steady", 4), ("steady", 2), ("mixed", 4)]
    assert [(row["case"]["load"], row["case"]["concurrency"], row["gate_passed"]) for row in over] == [
        (*load, True) for load in loads
    ]
    assert all(row["case"]["num_inflight_steps"] == 2 for row in over)
    assert all(row["case"]["max_num_batched_tokens"] == 512 for row in rows)
    peers = [row for row in rows if row["case"].get("engine") == "vllm 0.0"]
    assert [row["metric"] for row in peers] == ["ready_s", *["prefill_s"] * 2, *["output_tokens_per_s"] * 3]
    rates = {
        (row["case"]["load"], row["case"]["concurrency"]): row["value"]
        for row in rows
        if row["metric"] == "output_tokens_per_s" and row["case"]["engine"] == "idlm"
    }
    for row, theirs, load in zip(over, peers[3:], loads, strict=True):
        assert row["value"] == pytest.approx(rates[load] / theirs["value"])
    own = [row for row in rows if row["metric"] == "prefill_over_vllm"]
    times = {str(row["case"]): row["value"] for row in rows if row["metric"] == "prefill_s"}
    for ours, theirs, number in zip(own, peers[1:3], (4, 2), strict=True):
        assert ours["case"]["prompts"] == theirs["case"]["prompts"] == number
        assert ours["value"] == pytest.approx(times[str(ours["case"])] / theirs["value"])
