"""What tells model families apart: the traps of loading by number, each refused or
read right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from idlm.errors import UserError
from idlm.infer.cli.generate import generate
from idlm.infer.models import fp8, weights
from idlm.infer.models.base import FAMILIES, Shards
from idlm.infer.models.dense import weight_targets
from idlm.infer.models.loader import make_trunk
from idlm.semantics import Semantics
from tests.numerics import full_reference
from tests.numerics.llada2_reference import CONFIG as LLADA2
from tests.numerics.llada2_reference import random_tensors
from tests.toy import load_model, write_toy_checkpoint
from tests.unit.models.test_loader import CONFIG as DENSE
from tests.unit.models.test_loader import refused

EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 5,
    "norm_topk_prob": True,
    "rope_theta": 1e6,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "Qwen3ForCausalLM": DENSE,
    "SDARForCausalLM": DENSE | {"model_type": "sdar"},
    "Qwen3MoeForCausalLM": DENSE | EXPERTS | {"model_type": "qwen3_moe"},
    "SDARMoeForCausalLM": DENSE | EXPERTS | {"model_type": "sdar_moe"},
    "Fast_dLLM_QwenForCausalLM": DENSE | {"model_type": "Fast_dLLM_Qwen", "bd_size": 8, "mask_token_id": 9},
    "LLaDA2MoeModelLM": LLADA2,
    "LLaDAModelLM": full_reference.LLADA,
    "LLaDAMoEModelLM": full_reference.LLADA_MOE,
    "DreamModel": full_reference.DREAM,
}
BLOCKS = Semantics(causality="block", logit_shift=False, block_size=4, mask_token_id=9)
NEEDS_WORDS = ("SDARForCausalLM", "SDARMoeForCausalLM")


def write(directory: Path, architecture: str, **changes: Any) -> Path:
    """A random checkpoint of a family; the value `REMOVED` removes a field of its config."""
    config = CONFIGS[architecture] | {"architectures": [architecture]}
    if architecture == "LLaDA2MoeModelLM":
        stored = random_tensors(config)
    else:
        family = FAMILIES.get(architecture)
        trunk = make_trunk(family.spec(config), device=torch.device("meta"), dtype=torch.float32)
        targets = weight_targets(trunk, family.tensor_names)
        stored = {name: torch.randn(target.shape) for name, target in targets.items()}
    directory.mkdir(exist_ok=True)
    save_file(stored, directory / "model.safetensors")
    written = {key: value for key, value in (config | changes).items() if value != "REMOVED"}
    (directory / "config.json").write_text(json.dumps(written))
    return directory


@pytest.mark.parametrize("architecture", NEEDS_WORDS)
def test_sdar_does_not_load_without_semantics(architecture: str, tmp_path: Path) -> None:
    write(tmp_path, architecture)
    refused(tmp_path, "IDLM-0605", "does not determine how it decodes", "idlm_config.json")
    BLOCKS.save(tmp_path)
    assert load_model(tmp_path, device="cpu").semantics == BLOCKS


@pytest.mark.parametrize(
    ("architecture", "model_type"),
    [
        ("LLaDA2MoeModelLM", "bailing_moe_v2"),
        ("LLaDA2MoeModelLM", "llada"),
        ("LLaDAModelLM", "llada2_moe"),
        ("DreamModel", "qwen2"),
        ("Fast_dLLM_QwenForCausalLM", "qwen2"),
        ("SDARMoeForCausalLM", "qwen3_moe"),
        ("Qwen3MoeForCausalLM", "sdar_moe"),
    ],
)
def test_architecture_and_model_type_must_go_together(
    architecture: str, model_type: str, tmp_path: Path
) -> None:
    write(tmp_path, architecture, model_type=model_type)
    refused(tmp_path, "IDLM-0615", architecture, model_type)


def test_every_family_declares_which_row_predicts_a_token(tmp_path: Path) -> None:
    meanings = {
        name: load_model(write(tmp_path / name, name), device="cpu").semantics
        for name in CONFIGS
        if name not in NEEDS_WORDS
    }
    found = {name: (m.causality, m.logit_shift, m.block_size) for name, m in meanings.items()}
    assert found == {
        "Qwen3ForCausalLM": ("causal", True, None),
        "Qwen3MoeForCausalLM": ("causal", True, None),
        "Fast_dLLM_QwenForCausalLM": ("block", True, 8),
        "LLaDA2MoeModelLM": ("block", False, 32),
        "LLaDAModelLM": ("full", False, None),
        "LLaDAMoEModelLM": ("full", False, None),
        "DreamModel": ("full", True, None),
    }


@pytest.mark.parametrize("architecture", ["Fast_dLLM_QwenForCausalLM", "LLaDA2MoeModelLM"])
def test_what_an_architecture_cannot_be_is_refused(architecture: str, tmp_path: Path) -> None:
    write(tmp_path, architecture)
    right = load_model(tmp_path, device="cpu").semantics
    wrong = Semantics(causality="causal", logit_shift=not right.logit_shift, mask_token_id=9)
    wrong.save(tmp_path)
    refused(tmp_path, "IDLM-0616", "causality='causal'", "logit_shift")


def test_published_ids_and_a_mask_that_stops(tmp_path: Path) -> None:
    fast = FAMILIES.get("Fast_dLLM_QwenForCausalLM").semantics({"bd_size": 32})
    llada = FAMILIES.get("LLaDA2MoeModelLM").semantics({})
    assert (fast.mask_token_id, fast.stop_token_ids) == (151_665, (151_645,))
    assert (llada.mask_token_id, llada.stop_token_ids) == (156_895, (156_892, 156_900))
    with pytest.raises(UserError, match="stop_token_ids") as caught:
        Semantics(mask_token_id=156_895, stop_token_ids=(156_892, 156_895))
    assert caught.value.code == "IDLM-0304"
    write(tmp_path, "LLaDA2MoeModelLM", mask_token_id="REMOVED")
    refused(tmp_path, "IDLM-0606", "mask_token_id=156895", "97 embedding rows")


@pytest.mark.parametrize("block_size", [None, 0, 2.5, True])
def test_blocks_have_a_size(block_size: Any) -> None:
    with pytest.raises(UserError, match="block_size"):
        Semantics(causality="block", block_size=block_size)


@pytest.mark.parametrize("architecture", CONFIGS)
def test_no_family_guesses_the_base_period(architecture: str, tmp_path: Path) -> None:
    write(tmp_path, architecture, rope_parameters="REMOVED", rope_theta="REMOVED")
    refused(tmp_path, "IDLM-0604", "rope_theta=None")


def test_head_dim_is_width_by_heads_in_models_of_experts_alone() -> None:
    """Where a config has none, as in transformers."""
    for architecture in ("Qwen3ForCausalLM", "SDARForCausalLM", "Qwen3MoeForCausalLM", "SDARMoeForCausalLM"):
        config = {key: value for key, value in CONFIGS[architecture].items() if key != "head_dim"}
        own = config["hidden_size"] // config["num_attention_heads"]
        expected = own if "Moe" in architecture else 128
        assert FAMILIES.get(architecture).spec(config).head_dim == expected != 0


@pytest.mark.parametrize(
    "changes",
    [
        {"partial_rotary_factor": 0.5},
        {"rotary_dim": 6},
        {"partial_rotary_factor": "REMOVED", "rotary_dim": "REMOVED"},
        {"partial_rotary_factor": "REMOVED", "rotary_dim": 7},
        {"partial_rotary_factor": "REMOVED", "rotary_dim": 14},
        {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4}, "rotary_dim": 8},
    ],
)
def test_the_rotated_part_of_a_head_is_read_and_consistent(changes: dict[str, Any], tmp_path: Path) -> None:
    write(tmp_path, "LLaDA2MoeModelLM", **changes)
    refused(tmp_path, "IDLM-0604", "rotary_dim" if "rope_scaling" not in changes else "yarn")


@pytest.mark.parametrize(
    "changes",
    [{"partial_rotary_factor": "REMOVED"}, {"rotary_dim": "REMOVED"}, {"rope_parameters": "in there"}],
)
def test_either_key_for_the_rotated_part_is_read(changes: dict[str, Any], tmp_path: Path) -> None:
    if "rope_parameters" in changes:
        rope = {"rope_type": "default", "rope_theta": 600.0, "partial_rotary_factor": 2 / 3}
        gone = dict.fromkeys(("partial_rotary_factor", "rotary_dim", "rope_theta"), "REMOVED")
        changes = {**gone, "rope_parameters": rope}
    spec = load_model(write(tmp_path, "LLaDA2MoeModelLM", **changes), device="cpu").spec
    assert spec.rotary_dim == 8 and spec.rope_inv_freq[4:] == (0.0, 0.0)


def test_sdar_moe_requires_a_normalising_router(tmp_path: Path) -> None:
    write(tmp_path, "SDARMoeForCausalLM", norm_topk_prob="REMOVED")
    BLOCKS.save(tmp_path)
    refused(tmp_path, "IDLM-0604", "norm_topk_prob")


def test_llada2_fills_no_field_in(tmp_path: Path) -> None:
    free = {"architectures", "model_type", "dtype", "mask_token_id", "score_function"}
    either = {"partial_rotary_factor", "rotary_dim"}
    for field in LLADA2.keys() - free - either:
        config = {key: value for key, value in LLADA2.items() if key != field}
        with pytest.raises(UserError, match=field) as caught:
            FAMILIES.get("LLaDA2MoeModelLM").spec(config)
        assert caught.value.code == "IDLM-0604"


@pytest.mark.parametrize("is_stated", [True, False, None])
def test_tensors_decide_whether_llada2_normalises_queries(is_stated: bool | None, tmp_path: Path) -> None:
    changes = {} if is_stated is None else {"use_qk_norm": is_stated}
    write(tmp_path, "LLaDA2MoeModelLM", **changes)
    assert load_model(tmp_path, device="cpu").spec.qk_norm
    stored = load_file(tmp_path / "model.safetensors")
    save_file(
        {name: tensor for name, tensor in stored.items() if "y_layernorm" not in name},
        tmp_path / "model.safetensors",
    )
    if is_stated:
        refused(tmp_path, "IDLM-0603", "6 missing", "query_layernorm")
    else:
        assert not load_model(tmp_path, device="cpu").spec.qk_norm


@pytest.mark.parametrize(
    ("architecture", "changes", "words"),
    [
        ("Qwen3MoeForCausalLM", {"num_experts_per_tok": 5}, "num_experts_per_tok=5"),
        ("Qwen3MoeForCausalLM", {"num_local_experts": 8}, "num_local_experts=8"),
        ("Qwen3MoeForCausalLM", {"mlp_only_layers": 1}, "mlp_only_layers=1"),
        ("LLaDA2MoeModelLM", {"n_group": 5}, "n_group=5"),
        ("LLaDA2MoeModelLM", {"topk_group": 5}, "topk_group=5"),
        ("LLaDA2MoeModelLM", {"num_experts_per_tok": 7}, "num_experts_per_tok=7"),
        ("LLaDA2MoeModelLM", {"score_function": "softmax"}, "score_function='softmax'"),
        ("LLaDA2MoeModelLM", {"router_dtype": "bf16"}, "router_dtype='bf16'"),
        ("LLaDA2MoeModelLM", {"use_bias": True}, "use_bias=True"),
        ("Fast_dLLM_QwenForCausalLM", {"bd_size": "REMOVED"}, "bd_size"),
    ],
)
def test_configs_no_router_can_follow_are_refused(
    architecture: str, changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    write(tmp_path, architecture, **changes)
    refused(tmp_path, "IDLM-0604", words)


@pytest.mark.parametrize("changes", [{"mlp_only_layers": list(range(3))}, {"decoder_sparse_step": 9}])
def test_experts_that_no_layer_has_are_not_counted(changes: dict[str, Any], tmp_path: Path) -> None:
    write(tmp_path, "Qwen3ForCausalLM")
    path = tmp_path / "config.json"
    experts = CONFIGS["Qwen3MoeForCausalLM"] | {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 999}
    assert experts["num_hidden_layers"] <= 3
    path.write_text(json.dumps(experts | changes))
    assert load_model(tmp_path, device="cpu").spec.moe is None


def test_what_a_model_with_experts_cannot_do_yet_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "LLaDA2MoeModelLM")
    with pytest.raises(UserError, match="IDLM-0617"):
        fp8.quantise(load_model(tmp_path, device="cpu").trunk)


def test_experts_that_ranks_cannot_share_evenly_are_refused(tmp_path: Path) -> None:
    write(tmp_path, "Qwen3MoeForCausalLM", num_experts=3)
    refused(tmp_path, "IDLM-0423", "num_experts=3", shards=Shards(rank=0, size=2))


def test_describe_names_decoder_and_accelerators_and_refuses_misspelt_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, "LLaDA2MoeModelLM")
    base = [f"model={tmp_path}", "describe=true"]
    assert generate([*base, "decoder.steps=2", "accelerators=[mage]", "accelerators.mage.k=7"]) == 0
    shown = capsys.readouterr().out
    assert "decoder     block(strategy='low_confidence_dynamic'" in shown
    assert "steps=2" in shown
    assert "accelerator mage(k=7, exact_layers=2)" in shown
    for code, arguments in (
        ("IDLM-0102", ["accelerators=[maeg]"]),
        ("IDLM-0102", ["decoder=blok"]),
        ("IDLM-0416", ["decoder.step=2"]),
        ("IDLM-0451", ["decoder.sub_block_size=5"]),
        ("IDLM-0452", ["decoder=ar"]),
        ("IDLM-0101", ["num_pages=0"]),
    ):
        with pytest.raises(UserError, match=code):
            generate([*base, *arguments])


def test_describe_reports_the_configuration_without_reading_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, "LLaDA2MoeModelLM")
    stored = load_file(tmp_path / "model.safetensors")
    extra = {"model.layers.0.attention.rotary_emb.inv_freq": torch.ones(2)}
    save_file(stored | extra, tmp_path / "model.safetensors")
    monkeypatch.setattr(weights, "copy", None)
    assert generate([f"model={tmp_path}", "describe=true"]) == 0
    shown = capsys.readouterr().out
    numbers = sum(tensor.numel() for tensor in stored.values())
    for words in (
        "LLaDA2MoeModelLM (llada2)",
        "from the family",
        "causality='block'",
        "block_size=32",
        "dtype=float32",
        "rotary_dim=8",
        "num_experts=12",
        f"{len(stored)} read, {numbers:,} numbers",
        "ignored     model.layers.0.attention.rotary_emb.inv_freq",
        "in 9 tensors",
    ):
        assert words in shown, words


def test_describe_memory_prints_the_plan_of_a_canvas(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every tensor with its bytes and lifetime, without weights being loaded."""
    tensors = full_reference.random_tensors("llada")
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(full_reference.LLADA | {"dtype": "float32"}))
    assert generate([f"model={tmp_path}", "describe=memory", "max_length=64", "device=cpu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("dense, attention whole: 64 rows, 64 wanted, 2 layers")
    assert any(line.split()[:2] == ["x", f"{64 * 32 * 4:,}"] for line in lines)
    assert f"weights {4 * sum(each.numel() for each in tensors.values()):,} bytes" in lines[-1]
    monkeypatch.setattr("idlm.kernels.masked_logits.has_fused", lambda device: True)
    assert generate([f"model={tmp_path}", "describe=memory", "max_length=64", "device=cpu"]) == 0
    found = capsys.readouterr().out.splitlines()
    assert found[: len(lines) - 1] == lines[:-1] and found[-1] == lines[-1]
    further = found[len(lines) - 1 : -1]
    assert further[0].startswith("dense, attention whole, no logits: 64 rows, 64 wanted")
    tensors_found = {line.split()[0] for line in further}
    assert {"x", "ranges"} <= tensors_found and "logits" not in tensors_found
    guided = [f"model={tmp_path}", "describe=memory", "max_length=64", "device=cpu", "decoder.guidance=1.5"]
    assert generate(guided) == 0
    found = capsys.readouterr().out.splitlines()
    assert found[0].startswith("dense, attention whole: 128 rows, 128 wanted")
    assert len(found) == len(lines), "two canvases store logits"


def test_describe_memory_of_another_model_is_refused(tmp_path: Path) -> None:
    write_toy_checkpoint(tmp_path)
    with pytest.raises(UserError, match="IDLM-0472"):
        generate([f"model={tmp_path}", "describe=memory", "device=cpu"])
