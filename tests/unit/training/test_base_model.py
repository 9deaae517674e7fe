"""A base is loaded whole or refused, with its mask token and a reason; so is a model that would be trained as
another one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig

from idlm.checkpoint import MANIFEST
from idlm.errors import UserError
from idlm.text.tokenizer import load_tokenizer, num_token_ids
from idlm.train.check import check_config
from idlm.train.config.schema import AdapterConfig, ExportConfig, ModelConfig, TrainConfig
from idlm.train.model import attention as attention_module
from idlm.train.model import checks as model_module
from idlm.train.model.checks import check_model, grow_vocabulary, mask_token
from idlm.train.model.load import load_base, random_model
from idlm.train.model.stored import export_dtype, read_generation_config
from tests.errors import refused
from tests.tiny_training import tiny_model

TINY = Path(__file__).resolve().parents[3] / "recipes" / "assets" / "tiny_ar"
NAME = "model.layers.1.mlp.up_proj.weight"


def _weights(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def apply(directory: Path) -> None:
        path = directory / "model.safetensors"
        tensors = load_file(path)
        change(tensors)
        path.unlink()
        save_file(tensors, path, metadata={"format": "pt"})

    return apply


def _bytes(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def apply(directory: Path) -> None:
        content = (directory / name).read_bytes()
        (directory / name).unlink()
        (directory / name).write_bytes(change(content))

    return apply


def _config(**values: object) -> Callable[[Path], None]:
    return _bytes("config.json", lambda old: json.dumps({**json.loads(old), **values}).encode())


@pytest.mark.parametrize(
    ("damage", "code", "words"),
    [
        (_weights(lambda tensors: tensors.update(surplus=torch.zeros(2))), "IDLM-0541", "surplus"),
        (
            _weights(lambda tensors: tensors.update({NAME: torch.zeros(2, 2)})),
            "IDLM-0541",
            "1 of the wrong shape",
        ),
        (_bytes("model.safetensors", lambda old: b""), "IDLM-0607", "cannot be read"),
        (_config(num_hidden_layers=3, layer_types=None), "IDLM-0541", "not used"),
    ],
)
def test_damaged_bases_are_refused_by_name(
    tmp_path: Path, damage: Callable[[Path], None], code: str, words: str
) -> None:
    directory = tmp_path / "base"
    shutil.copytree(TINY, directory, ignore=shutil.ignore_patterns(MANIFEST))
    damage(directory)
    error = refused(code, load_base, str(directory), attention="idlm_sdpa", dtype=torch.float32)
    assert words in error.message


@pytest.mark.parametrize(
    ("name", "words"),
    [("adapter_config.json", "an adapter"), ("a.gguf", "a.gguf .GGUF"), ("training_args.bin", "no config")],
)
def test_a_folder_without_a_base_is_named_by_what_it_has(name: str, words: str, tmp_path: Path) -> None:
    (tmp_path / name).touch()
    with pytest.raises(UserError, match=f"{tmp_path} is not a checkpoint directory: it has {words}"):
        check_config(TrainConfig(model=ModelConfig(path=str(tmp_path))))


def test_weights_that_are_not_finite_are_named(tmp_path: Path) -> None:
    directory = tmp_path / "base"
    shutil.copytree(TINY, directory, ignore=shutil.ignore_patterns(MANIFEST))
    _weights(lambda tensors: tensors[NAME][3].fill_(torch.nan))(directory)
    model = load_base(str(directory), attention="idlm_sdpa", dtype=torch.float32)
    with pytest.raises(UserError, match=f"IDLM-0505: the logits of .* are not finite, nor is {NAME}"):
        check_model(model, attention="idlm_sdpa")


def test_a_base_that_cannot_be_built_is_refused_by_the_plan_too(tmp_path: Path) -> None:
    directory = tmp_path / "base"
    shutil.copytree(TINY, directory, ignore=shutil.ignore_patterns(MANIFEST))
    _config(hidden_act="nonsense")(directory)
    for is_planned in (False, True):
        with pytest.raises(UserError, match="IDLM-0541: model.path=.* cannot be loaded: .*nonsense"):
            load_base(str(directory), attention="eager", dtype=torch.float32, is_planned=is_planned)


def test_a_base_with_a_manifest_is_checked_against_it(tmp_path: Path) -> None:
    shutil.copytree(TINY, tmp_path / "base")
    load_base(str(tmp_path / "base"), attention="idlm_sdpa", dtype=torch.float32)
    path = tmp_path / "base" / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))
    refused("IDLM-0302", load_base, str(tmp_path / "base"), attention="idlm_sdpa", dtype=torch.float32)


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ({"temperature": 0.9, "top_p": 0.6}, {"do_sample": True, "temperature": 0.9, "top_p": 0.6}),
        ({"do_sample": False, "temperature": 0.7}, {"do_sample": False, "temperature": None}),
        (
            {"num_beams": 1, "length_penalty": 0.5},
            {"num_beams": 1, "length_penalty": None, "do_sample": None},
        ),
        ({"do_sample": True, "top_k": 20}, {"do_sample": True, "top_k": 20}),
        ({"pad_token_id": -1}, {"pad_token_id": None}),
    ],
)
def test_a_generation_config_in_the_wild_can_be_saved(
    tmp_path: Path, given: dict[str, object], kept: dict[str, object]
) -> None:
    directory = tmp_path / "base"
    shutil.copytree(TINY, directory, ignore=shutil.ignore_patterns(MANIFEST, "generation_config.json"))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": 1, **given}))
    model = load_base(str(directory), attention="idlm_sdpa", dtype=torch.float32)
    model.generation_config.eos_token_id = [1, 2]
    model.save_pretrained(tmp_path / "saved")
    saved = json.loads((tmp_path / "saved" / "generation_config.json").read_text())
    assert {name: saved.get(name) for name in kept} == kept
    read = read_generation_config(directory)
    assert read is not None and {name: getattr(read, name) for name in kept} == kept


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_published_weights_have_the_dtype_of_most_of_the_base(dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = {"norm": torch.ones(4, dtype=torch.float32), "weight": torch.ones(64, 4, dtype=dtype)}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = TrainConfig(model=ModelConfig(path=str(tmp_path)))
    assert getattr(torch, export_dtype(config)) == dtype
    config.export = ExportConfig(dtype="float32")
    assert export_dtype(config) == "float32"
    gated = TrainConfig(model=config.model, adapter=AdapterConfig())
    assert export_dtype(gated) == "float32"
    assert export_dtype(TrainConfig(model=ModelConfig(dtype="bfloat16"))) == "bfloat16", "new weights"


@pytest.mark.parametrize(
    ("spare_rows", "added", "explicit", "words"),
    [
        (3, "<repo_name>", None, "the first spare row"),
        (0, "<repo_name>", None, "no row is spare, so the unused special token '<repo_name>'"),
        (0, "<repo_name>", -1, "model.mask_token_id, '<repo_name>'"),
        (2, "<own>", 1, "model.mask_token_id, a spare row"),
        (0, "<own>", None, "no special token unused, so {} rows are added, which start at the mean"),
    ],
)
def test_the_choice_and_its_reason(spare_rows, added, explicit, words) -> None:
    """`explicit` counts from the first id after the tokenizer's."""
    tokenizer = load_tokenizer(TINY)
    tokenizer.add_tokens([added], special_tokens=True)
    num_ids = num_token_ids(tokenizer)
    given, num_rows = None if explicit is None else num_ids + explicit, num_ids + spare_rows
    mask_token_id, has_row, shown = mask_token(tokenizer, num_rows, given)
    assert shown.startswith(f"mask token {mask_token_id}: ")
    assert words.format(64 - num_rows % 64) in shown
    assert has_row == (mask_token_id < num_rows)


@pytest.mark.parametrize("is_tied", [False, True])
def test_rows_that_are_added_start_at_the_mean(is_tied) -> None:
    shape = LlamaConfig(
        vocab_size=70, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        tie_word_embeddings=is_tied,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(shape)
    before_VD = model.get_input_embeddings().weight.detach().clone()
    grow_vocabulary(model, 70)
    table_VD = model.get_input_embeddings().weight.detach()
    assert table_VD.shape == (128, 16) and model.config.vocab_size == 128
    assert torch.equal(table_VD[:70], before_VD)
    torch.testing.assert_close(table_VD[70], before_VD.mean(dim=0), atol=1e-3, rtol=0)
    assert len(model.get_output_embeddings().weight) == 128


def test_a_model_that_ignores_the_mask_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("qwen3")
    check_model(model, attention="idlm_sdpa")
    monkeypatch.setattr(model_module, "mask_arguments", lambda meta, attention: {"attention_mask": None})
    refused("IDLM-0505", check_model, model, attention="idlm_sdpa")


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
    refused("IDLM-0505.* (cap|sinks)", check_model, model, attention=attention)
    # What no name gives away shows in the logits.
    monkeypatch.setattr(attention_module, "UNSUPPORTED", {})
    refused("attention that idlm does not compute", check_model, model, attention=attention)
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
    refused("not finite", check_model, model, attention="idlm_sdpa")


def test_logits_changed_after_the_head_are_refused() -> None:
    model = tiny_model("llama")
    plain = type(model).forward

    class Capped(type(model)):
        def forward(self, *args, **kwargs):
            output = plain(self, *args, **kwargs)
            output.logits = 5 * torch.tanh(output.logits / 5)
            return output

    model.__class__ = Capped
    refused("IDLM-0505", check_model, model, attention="idlm_sdpa")
