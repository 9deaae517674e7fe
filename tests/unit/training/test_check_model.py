"""Models that would be trained as another model, or not at all, are refused before the first step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from idlm.errors import UserError
from idlm.train.model import attention as attention_module
from idlm.train.model import checks as model_module
from idlm.train.model.checks import check_model
from idlm.train.model.load import load_base, random_model
from tests.tiny_training import tiny_model


def test_a_model_that_ignores_the_mask_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("qwen3")
    check_model(model, attention="idlm_sdpa")
    monkeypatch.setattr(model_module, "mask_arguments", lambda meta, attention: {"attention_mask": None})
    with pytest.raises(UserError, match="IDLM-0505"):
        check_model(model, attention="idlm_sdpa")


SPECIAL_ATTENTION = {
    "gemma2": {"attn_logit_softcapping": 5.0, "final_logit_softcapping": None, "query_pre_attn_scalar": 16},
    "gpt_oss": {"num_local_experts": 2, "num_experts_per_tok": 1},
}


@pytest.mark.parametrize("family", SPECIAL_ATTENTION)
def test_attention_that_would_be_another_is_refused(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cap on scores, sinks: transformers hands both on as further arguments."""
    attention = "idlm_documents"
    values = {"model_type": family, "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48}
    values |= {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    values |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    values |= SPECIAL_ATTENTION[family]
    model = random_model(values, attention=attention, dtype=torch.float32, seed=0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.5)
    with pytest.raises(UserError, match="IDLM-0505.* (cap|sinks)"):
        check_model(model, attention=attention)
    # What no name gives away shows in the logits.
    monkeypatch.setattr(attention_module, "UNSUPPORTED", {})
    with pytest.raises(UserError, match="attention that idlm does not compute"):
        check_model(model, attention=attention)
    assert model.config._attn_implementation == attention


@pytest.mark.parametrize("family", ["bloom", "falcon"])
def test_an_architecture_with_attention_of_its_own_is_refused_by_name(family: str, tmp_path: Path) -> None:
    values = {"model_type": family, "vocab_size": 64, "hidden_size": 32, "n_layer": 1, "n_head": 2}
    values |= {"num_hidden_layers": 1, "num_attention_heads": 2, "bos_token_id": None, "eos_token_id": None}
    random_model(values, attention="eager", dtype=torch.float32, seed=0).save_pretrained(tmp_path)
    attention = "idlm_documents"
    with pytest.raises(UserError, match="IDLM-0505"):
        check_model(load_base(str(tmp_path), attention=attention, dtype=torch.float32), attention=attention)


def test_a_base_that_computes_nan_is_named_as_such() -> None:
    model = tiny_model("qwen3")
    with torch.no_grad():
        model.get_output_embeddings().weight[3, 3] = float("nan")
    with pytest.raises(UserError, match="not finite"):
        check_model(model, attention="idlm_sdpa")


def test_logits_changed_after_the_head_are_refused() -> None:
    model = tiny_model("llama")
    plain = type(model).forward

    class Capped(type(model)):
        def forward(self, *args, **kwargs):
            output = plain(self, *args, **kwargs)
            output.logits = 5 * torch.tanh(output.logits / 5)
            return output

    model.__class__ = Capped
    with pytest.raises(UserError, match="IDLM-0505"):
        check_model(model, attention="idlm_sdpa")
