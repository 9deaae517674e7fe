"""The tiny recipe's code converts other families: train, export, load in transformers and in our engine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from idlm.contracts import SamplingParams
from idlm.infer.engine import Engine
from idlm.tasks.tokenizer import save_tokenizer
from idlm.train import cli
from idlm.train.checkpoint.export import _require_bitwise
from idlm.train.model.load import random_model
from tests.integration.training.test_train_tiny import arguments
from tests.tiny_training import tiny_config

STAGES = "[{stride: 2, steps: 1, clean_weight: 0.2}, {stride: 3, steps: 2, clean_weight: auto}]"
PROMPTS = ["Lea has 9 shells. Lea wins 3. How many shells does Lea have?", "Tom has 4 books."]


MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}


@pytest.mark.sweep
def test_a_model_of_experts_converts_and_decodes(tmp_path: Path) -> None:
    import transformers

    base, output = tmp_path / "base", tmp_path / "out"
    base.mkdir()
    save_tokenizer(base)
    config = tiny_config("qwen3_moe") | {"vocab_size": 192} | MOE
    random_model(config, attention="idlm_sdpa", dtype=torch.float32, seed=0).save_pretrained(base)
    assert cli.main(["dry_run=true", *arguments(base, output, **{"train.stages": STAGES})]) == 0
    assert cli.main(arguments(base, output, **{"train.stages": STAGES, "report.enabled": "true"})) == 0

    stock = transformers.AutoModelForCausalLM.from_pretrained(output)
    assert stock.config.model_type == "qwen3_moe"
    greedy = SamplingParams(temperature=0, max_tokens=24)
    ar = Engine.from_pretrained(output, "ar", device="cpu").generate(PROMPTS, greedy)
    isd = Engine.from_pretrained(output, device="cpu").generate(PROMPTS, greedy)
    assert [done.token_ids for done in isd] == [done.token_ids for done in ar]
    assert "Sample generations" in (output / "report.md").read_text()


def test_what_a_family_stores_under_other_names_is_read_back(tmp_path: Path) -> None:
    model = random_model(
        tiny_config("qwen3_moe") | MOE, attention="idlm_documents", dtype=torch.float32, seed=0
    )
    model.save_pretrained(tmp_path)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    _require_bitwise(weights, tmp_path, type(model))
    name = next(name for name in weights if "experts" in name)
    weights[name].view(-1)[-1] += 1
    with pytest.raises(AssertionError, match="experts"):
        _require_bitwise(weights, tmp_path, type(model))
