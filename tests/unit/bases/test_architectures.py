"""Architectures of transformers: idlm trains or refuses them, with the reason, before weights are read."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from idlm.errors import UserError
from idlm.train.model import stand_in
from idlm.train.model.stand_in import MAX_ELEMENTS, causal_class, check_architecture
from tests.unit.bases.agreement import small_config

MOE = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
MLA = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 24,
    "head_dim": 8, "num_key_value_heads": 4, "n_routed_experts": 4, "n_group": 1, "topk_group": 1,
    "num_experts_per_tok": 2, "moe_intermediate_size": 16,
}  # fmt: skip
WINDOW = {"sliding_window": 512}
SINKS, NO_ARGUMENTS, STATE = "attention sinks", "hand the attention mask alone", "carries something"
FAMILIES = {
    "llama": ({}, None),
    "gpt2": ({}, None),
    "qwen3_moe": (MOE, None),
    "deepseek_v3": (MLA, None),
    "gemma2": (WINDOW, "cap on attention scores"),
    "gpt_oss": (MOE | WINDOW, SINKS),
    "stablelm": ({}, NO_ARGUMENTS),
    "nemotron": ({}, NO_ARGUMENTS),
    "falcon": ({}, "attention be chosen"),
    "cohere": ({}, "changes its logits after the head"),
    "bert": ({}, "is not causal"),
    "jamba": (MOE | {"mamba_d_state": 4, "mamba_dt_rank": 4}, STATE),
    "mamba": ({"state_size": 4, "time_step_rank": 4}, "does not run under a prepared"),
    "bart": ({}, "an encoder and a decoder"),
    "t5": ({}, "an encoder and a decoder"),
    "vit": ({}, "no causal language model"),
    "gemma3": ({}, "reads more than text .vision_config"),
    "gptj": ({"rotary_dim": 64}, "does not (run by itself: config.json may be|let its attention be chosen)"),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_an_architecture_is_trained_or_refused_by_name(family: str) -> None:
    fields, words = FAMILIES[family]
    before = torch.random.get_rng_state()
    if words is None:
        check_architecture(small_config(family, **fields), attention="idlm_documents")
    else:
        with pytest.raises(UserError, match=f"IDLM-0505.*{words}"):
            check_architecture(small_config(family, **fields), attention="idlm_documents")
    assert torch.equal(torch.random.get_rng_state(), before), "training draws other numbers"


@pytest.mark.parametrize("family", ["stablelm", "nemotron"])
@pytest.mark.parametrize("attention", ["idlm_sdpa", "idlm_flex"])
def test_the_attention_that_is_advised_trains(family: str, attention: str) -> None:
    check_architecture(small_config(family), attention=attention)


# Sizes of published models.
LARGE = {
    "qwen3": {"hidden_size": 5120, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128},
    "llama": {
        "hidden_size": 8192,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "num_hidden_layers": 80,
    },
    "deepseek_v3": {},
    "gemma3_text": {},
    "gpt2": {"n_embd": 1600, "n_layer": 48, "n_head": 25},
    "gemma2": {},
}


@pytest.mark.sweep_but("llama", "gemma3_text")
@pytest.mark.parametrize("family", LARGE)
def test_a_large_base_has_a_small_stand_in_with_layers_of_all_kinds(family: str) -> None:
    config = AutoConfig.for_model(family, **LARGE[family])
    small = next(stand_in._smaller(config, causal_class(config)))
    assert stand_in._num_elements(small, causal_class(config)) <= MAX_ELEMENTS
    assert small.num_attention_heads < config.num_attention_heads
    kinds = getattr(config, "layer_types", None)
    assert kinds is None or set(small.layer_types) == set(kinds)
    refused = "cap on attention scores" if family == "gemma2" else None
    if refused is None:
        check_architecture(config, attention="idlm_documents")
    else:
        with pytest.raises(UserError, match=refused):
            check_architecture(config, attention="idlm_documents")


@pytest.mark.sweep
def test_no_family_ends_in_a_traceback() -> None:
    """Causal models of transformers that take small sizes are trained, or refused by a UserError."""
    refused: dict[str, str] = {}
    trained: list[str] = []
    for family in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)[::6]:
        try:
            config = small_config(family, sliding_window=512)
        # Validators of some families refuse these sizes.
        except Exception:
            continue
        try:
            check_architecture(config, attention="idlm_documents")
            trained.append(family)
        except UserError as error:
            refused[family] = error.code
    assert set(refused.values()) <= {"IDLM-0505", "IDLM-0541"}
    assert len(trained) > 7 and len(refused) > 7, (len(trained), len(refused))
