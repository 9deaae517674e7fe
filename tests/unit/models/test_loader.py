"""Loading: accepted checkpoints, and refusals with a code, the values and a fix."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from idlm.errors import UserError
from idlm.files.tensors import stored_tensors
from idlm.infer.models import weights
from idlm.infer.models.base import FAMILIES
from idlm.infer.models.dense import DenseTrunk, weight_targets
from idlm.semantics import Semantics
from idlm.train.model.stored import base_tensors
from tests.toy import load_model

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 11,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 6,
    "max_position_embeddings": 32,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "dtype": "float32",
}


def tensors() -> dict[str, torch.Tensor]:
    family = FAMILIES.get("Qwen3ForCausalLM")
    trunk = DenseTrunk(family.spec(CONFIG), device=torch.device("cpu"), dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    targets = weight_targets(trunk, family.tensor_names)
    return {name: torch.randn(target.shape, generator=generator) for name, target in targets.items()}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(CONFIG))
    save_file(tensors(), directory / "model.safetensors")
    return directory


def edit_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    merged = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in merged.items() if value != "REMOVED"}))


def shard(directory: Path, names: tuple[str, ...] = ("a-1.safetensors", "a-2.safetensors")) -> None:
    """Split the single file into shards with an index."""
    stored = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    weight_map = {name: names[number % len(names)] for number, name in enumerate(stored)}
    for file in names:
        save_file({name: stored[name] for name in stored if weight_map[name] == file}, directory / file)
    (directory / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )


def refused(directory: Path, code: str, *words: str, **kwargs: Any) -> None:
    with pytest.raises(UserError) as caught:
        load_model(directory, device="cpu", **kwargs)
    assert caught.value.code == code, caught.value
    for word in words:
        assert word in str(caught.value)


def test_every_tensor_arrives_in_the_fused_weights_once(checkpoint: Path) -> None:
    model, stored = load_model(checkpoint, device="cpu"), tensors()
    targets = weight_targets(model.trunk, FAMILIES.get(model.architecture).tensor_names)
    assert targets.keys() == stored.keys()
    for name, target in targets.items():
        assert torch.equal(target.view, stored[name].expand_as(target.view)), name
    held = {parameter.untyped_storage().data_ptr() for parameter in model.trunk.parameters()}
    assert all(target.view.untyped_storage().data_ptr() in held for target in targets.values())
    repeated_norms = CONFIG["num_hidden_layers"] * (2 + 1 - 2) * CONFIG["head_dim"]
    in_file = sum(tensor.numel() for tensor in stored.values())
    assert sum(parameter.numel() for parameter in model.trunk.parameters()) == in_file + repeated_norms


def test_sharded_equals_single(checkpoint: Path) -> None:
    single = load_model(checkpoint, device="cpu").trunk.state_dict()
    shard(checkpoint)
    sharded = load_model(checkpoint, device="cpu").trunk.state_dict()
    assert all(torch.equal(single[name], sharded[name]) for name in single)


def test_tied_embeddings_share_memory_and_need_no_head(checkpoint: Path) -> None:
    stored = tensors()
    del stored["lm_head.weight"]
    save_file(stored, checkpoint / "model.safetensors")
    refused(checkpoint, "IDLM-0603", "1 missing: lm_head.weight")
    edit_config(checkpoint, tie_word_embeddings=True)
    trunk = load_model(checkpoint, device="cpu").trunk
    assert trunk.head.data_ptr() == trunk.embed.data_ptr()


def test_all_tensor_problems_are_reported_at_once(checkpoint: Path) -> None:
    stored = tensors()
    del stored["model.layers.1.mlp.up_proj.weight"], stored["model.norm.weight"]
    stored["model.layers.0.self_attn.o_proj.weight"] = torch.zeros(8, 13)
    stored["model.layers.2.mlp.up_proj.weight"] = torch.zeros(1)
    stored["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(3)
    save_file(stored, checkpoint / "model.safetensors")
    with pytest.raises(UserError) as caught:
        load_model(checkpoint, device="cpu")
    message = str(caught.value)
    assert caught.value.code == "IDLM-0603"
    assert "2 missing: model.layers.1.mlp.up_proj.weight, model.norm.weight" in message
    assert "model.layers.0.self_attn.o_proj.weight is [8, 13], in config.json [8, 12]" in message
    assert "1 not used: model.layers.2.mlp.up_proj.weight" in message
    assert "inv_freq" not in message


def test_missing_path_names_the_nearest_sibling(checkpoint: Path) -> None:
    refused(checkpoint.parent / "modle", "IDLM-0600", "modle", "did you mean 'model'?")
    refused(checkpoint / "config.json", "IDLM-0600", "is not a directory")


@pytest.mark.parametrize(
    "given", [["Qwen3ForCausalLm"], ["os.system"], [], None, [3], ["Qwen3ForCausalLM", "B"]]
)
def test_unknown_architecture_names_the_known_ones(checkpoint: Path, given: Any) -> None:
    edit_config(checkpoint, architectures=given)
    refused(checkpoint, "IDLM-0601", repr(given), "LlamaForCausalLM", "SDARForCausalLM")


@pytest.mark.parametrize(
    ("name", "words"),
    [("model.gguf", "GGUF, the format of llama.cpp"), ("Q4.GGUF", "GGUF"), ("m.onnx", "ONNX")],
)
def test_other_formats_are_named(checkpoint: Path, name: str, words: str) -> None:
    (checkpoint / "model.safetensors").rename(checkpoint / name)
    refused(checkpoint / name, "IDLM-0600", "is not a directory: it is", words, "safetensors")
    refused(checkpoint, "IDLM-0602", "neither", words)
    (checkpoint / "config.json").unlink()
    refused(checkpoint, "IDLM-0600", "has no config.json: it has", words)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("pytorch_model.bin", ("pytorch_model.bin (a pickle", "convert it: python -c")),
        ("consolidated.00.pth", ("consolidated.00.pth (a pickle", "it was made from")),
        (
            "model-00001-of-00002.safetensors",
            ("it has model-00001-of", "download model.safetensors.index.json"),
        ),
        (None, ("neither model.safetensors nor model.safetensors.index.json\n", "download or copy the")),
    ],
)
def test_what_is_there_in_place_of_weights_is_named(
    checkpoint: Path, name: str | None, words: tuple[str, ...]
) -> None:
    (checkpoint / "model.safetensors").rename(checkpoint / (name or "training_args.bin"))
    refused(checkpoint, "IDLM-0602", *words)
    with pytest.raises(UserError, match="IDLM-0602") as caught:
        base_tensors(checkpoint)
    assert all(word in str(caught.value) for word in words)


def test_an_adapter_next_to_a_whole_model_is_named(checkpoint: Path) -> None:
    (checkpoint / "adapter_config.json").write_text("{}")
    with pytest.warns(UserWarning, match="the adapter next to the whole model is not applied") as caught:
        load_model(checkpoint)
    assert len(caught) == 1


@pytest.mark.parametrize("given", [None, "auto", "float64"])
def test_the_dtype_of_a_config_may_be_that_of_the_weights(checkpoint: Path, given: str | None) -> None:
    edit_config(checkpoint, dtype=given)
    assert load_model(checkpoint).dtype == (torch.float64 if given == "float64" else torch.float32)


def test_a_link_to_weights_that_are_gone_is_named(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").rename(checkpoint.parent / "blob")
    (checkpoint / "model.safetensors").symlink_to("../blob")
    load_model(checkpoint)
    (checkpoint.parent / "blob").unlink()
    refused(checkpoint, "IDLM-0602", "model.safetensors is a link to a file that is gone")


def test_the_folder_of_a_run_that_is_not_finished_is_named(checkpoint: Path) -> None:
    (checkpoint / "run").mkdir()
    (checkpoint / "run" / "config.yaml").touch()
    load_model(checkpoint)
    (checkpoint / "config.json").unlink()
    refused(checkpoint, "IDLM-0600", "has no config.json: its run of idlm-train is not finished", "again")


@pytest.mark.parametrize(
    "name", ["../x.safetensors", "/etc/x.safetensors", "sub/x.safetensors", "..", "x.bin", 3]
)
def test_an_index_cannot_point_outside_the_directory(checkpoint: Path, name: Any) -> None:
    shard(checkpoint)
    save_file({"model.norm.weight": torch.zeros(8)}, checkpoint.parent / "x.safetensors")
    path = checkpoint / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.norm.weight"] = name
    path.write_text(json.dumps(index))
    refused(checkpoint, "IDLM-0607", repr(str(name)))


@pytest.mark.parametrize("assigned", ["a-1.safetensors", "a-2.safetensors"])
def test_a_tensor_comes_from_the_shard_that_the_index_names(checkpoint: Path, assigned: str) -> None:
    """A copy of it in another shard, which may come before or after, is left out."""
    shard(checkpoint)
    index = checkpoint / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["lm_head.weight"] = assigned
    index.write_text(json.dumps(content))
    for name in ("a-1.safetensors", "a-2.safetensors"):
        value = torch.full((11, 8), float(name == assigned))
        save_file({**load_file(checkpoint / name), "lm_head.weight": value}, checkpoint / name)
    files = stored_tensors(checkpoint)
    assert weights.tensor(files, "lm_head.weight").eq(1).all()
    with pytest.raises(UserError, match=r"IDLM-0607: .* holds lm_head\.weight"):
        base_tensors(checkpoint)


def test_tensors_of_the_part_without_a_head_are_read(checkpoint: Path) -> None:
    """transformers' base classes save them without the prefix."""
    expected = load_model(checkpoint)
    for prefix in ("", "model."):
        stored = {name.removeprefix("model."): value for name, value in tensors().items()}
        save_file(
            {prefix + name if name != "lm_head.weight" else name: value for name, value in stored.items()},
            checkpoint / "model.safetensors",
        )
        found = load_model(checkpoint)
        for name, value in found.trunk.named_parameters():
            assert torch.equal(value, expected.trunk.get_parameter(name)), name
    del stored["lm_head.weight"]
    save_file(stored, checkpoint / "model.safetensors")
    refused(checkpoint, "IDLM-0603", "lm_head.weight")
    edit_config(checkpoint, tie_word_embeddings=True)
    load_model(checkpoint)


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_weights_that_are_not_finite_are_named(checkpoint: Path, value: float) -> None:
    for name in ("model.embed_tokens.weight", "model.layers.1.mlp.up_proj.weight"):
        given = tensors()
        given[name][3, 4] = value
        save_file(given, checkpoint / "model.safetensors")
        if "embed" in name:
            load_model(checkpoint)
        else:
            refused(checkpoint, "IDLM-0607", "1 tensors", "not finite", name)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_act": "gelu"}, ("hidden_act='gelu'", "'silu'")),
        (
            {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
            ("use_sliding_window=True",),
        ),
        ({"layer_types": ["full_attention", "sliding_attention"]}, ("layer_types", "sliding_attention")),
        ({"attn_logit_softcapping": 50.0}, ("attn_logit_softcapping=50.0", "None")),
        ({"quantization_config": {"quant_method": "gptq"}}, ("quantization_config", "gptq")),
        (
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            ("'dynamic'", "yarn"),
        ),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, ("'longrope'", "llama3")),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, ("cannot be used", "factor")),
        ({"rope_parameters": "REMOVED"}, ("rope_theta=None",)),
        ({"partial_rotary_factor": 0.5}, ("partial_rotary_factor=0.5",)),
        ({"head_dim": 7}, ("head_dim=7", "even")),
        ({"num_key_value_heads": 3}, ("num_key_value_heads=3",)),
        ({"hidden_size": "REMOVED", "vocab_size": -1}, ("hidden_size=None", "vocab_size=-1")),
        ({"num_hidden_layers": True}, ("num_hidden_layers=True",)),
        ({"architectures": ["MistralForCausalLM"]}, ("sliding_window", "null")),
        (
            {"architectures": ["MistralForCausalLM"], "sliding_window": 64, "hidden_act": "gelu"},
            ("sliding_window=64", "hidden_act='gelu'"),
        ),
    ],
)
def test_configs_that_change_the_arithmetic_are_refused(
    checkpoint: Path, changes: dict[str, Any], words: tuple[str, ...]
) -> None:
    edit_config(checkpoint, **changes)
    refused(checkpoint, "IDLM-0604", *words)


@pytest.mark.parametrize(
    "changes",
    [
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2},
        {"use_sliding_window": False, "sliding_window": 4096},
        {"layer_types": ["full_attention", "full_attention"]},
        {"attn_logit_softcapping": None, "some_new_field": 3},
    ],
)
def test_harmless_fields_load(checkpoint: Path, changes: dict[str, Any]) -> None:
    edit_config(checkpoint, **changes)
    load_model(checkpoint, device="cpu")


def test_mask_token_id_must_be_a_row(checkpoint: Path) -> None:
    assert load_model(checkpoint, device="cpu").semantics.mask_token_id is None
    assert load_model(checkpoint, device="cpu", mask_token_id=10).semantics.mask_token_id == 10
    refused(checkpoint, "IDLM-0606", "mask_token_id=11", "11 embedding rows", mask_token_id=11)


def test_a_mask_in_place_of_the_checkpoints_own_is_warned_of(checkpoint: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_model(checkpoint, device="cpu", mask_token_id=10)
        edit_config(checkpoint, mask_token_id=9)
        load_model(checkpoint, device="cpu", mask_token_id=9)
    with pytest.warns(UserWarning, match="mask_token_id=10 is used in place of 9") as caught:
        load_model(checkpoint, device="cpu", mask_token_id=10)
    assert len(caught) == 1
    Semantics(stride=3, mask_token_id=8).save(checkpoint)
    with pytest.warns(UserWarning, match="mask_token_id=9 is used in place of 8"):
        assert load_model(checkpoint, device="cpu", mask_token_id=9).semantics.mask_token_id == 9


@pytest.mark.parametrize(
    ("config_dtype", "dtype", "expected"),
    [
        ("float32", "auto", torch.float32),
        ("bfloat16", "auto", torch.bfloat16),
        ("REMOVED", "auto", torch.float32),
        ("float32", "bfloat16", torch.bfloat16),
        ("bfloat16", torch.float32, torch.float32),
    ],
)
def test_dtype(checkpoint: Path, config_dtype: str, dtype: str | torch.dtype, expected: torch.dtype) -> None:
    edit_config(checkpoint, dtype=config_dtype)
    model = load_model(checkpoint, device="cpu", dtype=dtype)
    assert {parameter.dtype for parameter in model.trunk.parameters()} == {expected}
    assert model.trunk.inv_freq.dtype == torch.float32
    refused(checkpoint, "IDLM-0608", "int8", "bfloat16", dtype="int8")
