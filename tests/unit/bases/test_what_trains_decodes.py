"""Bases that training accepts are those that the engine decodes, over all causal models of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from idlm.errors import UserError
from idlm.infer.models.loader import read_outline
from idlm.train.cli import main
from idlm.train.config.schema import ModelConfig, TrainConfig
from idlm.train.model.stand_in import check_architecture
from idlm.train.sampler import require_engine
from tests.errors import refused
from tests.numerics.test_model_parity import PagedSession, reference_logits
from tests.toy import load_model
from tests.unit.bases.agreement import small_config, write_base

DECODED = {
    *("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "olmo2", "smollm3", "granite", "phi3"),
    *("glm", "glm4", "gemma3_text", "internlm3", "iquestcoder"),
}
OTHERWISE: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 64},
    "qwen2": {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    "smollm3": {"use_sliding_window": True, "sliding_window": 8, "no_rope_layer_interval": 2},
    "gemma3_text": {"final_logit_softcapping": 30.0},
    "granite": {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
    "llama": {"hidden_act": "gelu"},
}
"""Fields with which a family is not decoded."""


def fields_of(family: str) -> dict[str, Any]:
    own = {
        "gemma3_text": {"sliding_window": 64},
        # As every published Granite 3.
        "granite": {
            "logits_scaling": 8.0,
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.0625,
        },
    }
    return own.get(family, {})


def run_of(family: str, **fields: Any) -> TrainConfig:
    """A run that makes new weights of a small model."""
    config = small_config(family, **{**fields_of(family), **fields}).to_dict()
    return TrainConfig(model=ModelConfig(config=config | {"model_type": family}))


@pytest.mark.sweep
def test_families_that_train_are_those_that_decode() -> None:
    """Training checks the architecture where the engine decodes it, or where training has no model of it."""
    accepted: set[str] = set()
    refused: dict[str, str] = {}
    for family in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        try:
            config = run_of(family)
        # Validators of some families refuse these sizes.
        except Exception:
            continue
        try:
            require_engine(config)
            check_architecture(small_config(family, **fields_of(family)), attention="idlm_documents")
            accepted.add(family)
        except UserError as error:
            refused[family] = error.code
    assert accepted == DECODED
    assert set(refused.values()) <= {"IDLM-0545", "IDLM-0505", "IDLM-0541"} and len(refused) > 60, refused


@pytest.mark.parametrize("family", ["internlm3", "iquestcoder"])
def test_a_base_that_is_accepted_has_the_logits_of_transformers(family: str, tmp_path: Path) -> None:
    """The others have theirs in tests/numerics."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(small_config(family, **fields_of(family))).eval()
    model.save_pretrained(tmp_path)
    tokens = torch.randint(3, 192, (90,)).tolist()
    found = PagedSession(load_model(tmp_path, device="cpu"), 1, num_pages=32).feed([tokens])[0]
    assert (found - reference_logits(model, tokens)).abs().max() <= 1e-4


@pytest.mark.parametrize("family", OTHERWISE)
def test_fields_that_the_engine_refuses_are_refused_in_training(family: str, tmp_path: Path) -> None:
    config = run_of(family, **OTHERWISE[family])
    refused("IDLM-0545", require_engine, config)
    AutoModelForCausalLM.from_config(small_config(family, **OTHERWISE[family])).save_pretrained(tmp_path)
    refused("IDLM-060[14]", read_outline, tmp_path)
    config.model.needs_engine = False
    require_engine(config)


def test_the_dry_run_refuses_it_and_its_fix_works(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = write_base(tmp_path / "base", "gpt2", max_position_embeddings=512)
    (tmp_path / "data.jsonl").write_text('{"prompt": "1+1=", "response": "2"}\n' * 8)
    arguments = [
        f"model.path={base}",
        f"data.path={tmp_path / 'data.jsonl'}",
        f"output_dir={tmp_path / 'out'}",
        *("dry_run=true", "train.device=cpu", "train.max_length=64"),
    ]
    assert main(arguments) == 2
    assert "IDLM-0545" in "".join(capsys.readouterr())
    main([*arguments, "model.needs_engine=false"])
    assert "IDLM-0545" not in "".join(capsys.readouterr())
