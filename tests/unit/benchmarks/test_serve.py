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


@pytest.mark.parametrize(("shift", "passes"), [(1, False), (0, True)])
def test_greedy_answers_of_vllm_are_a_gate(shift: int, passes: bool, tmp_path: Path) -> None:
    (tmp_path / "vllm.py").write_text(FAKE_VLLM.replace("SHIFT", str(shift)))
    arguments = ["concurrency=2", "decoders=ar", "parts=mixed", f"vllm={tmp_path}", f"results={tmp_path}"]
    assert serve.measure([*SMALL, *arguments]) == int(not passes)
    [over] = [row for row in read_rows("serve", results=tmp_path) if row["metric"] == "over_vllm"]
    assert over["gate_passed"] is passes
