"""Fixes of errors about the base and the settings are followed as they are written: the run is prepared."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import GenerationConfig

from tests.small_tokenizers import save_byte_level
from tests.unit.bases.agreement import config_of, of_the_dry_run, of_the_run, weights, with_keys, write_base

Settings = dict[str, Any]
PLAIN_LORA = {"adapter.rank": 4, "adapter.alpha": 8, "adapter.gated": "false", "export.merge": "true"}
GATED_LORA = {"adapter.rank": 4, "adapter.alpha": 8}
MASK_ROW = 180
"""A spare row of the bases here, behind the ids of their tokenizer."""

# name: (family, its fields, settings that are refused, words of the error and its fix, what the fix says).
BY_SETTINGS: dict[str, tuple[str, Settings, Settings, str, Settings]] = {
    "a window": ("mistral", {"sliding_window": 64}, {}, "set train.max_length=64", {"train.max_length": 64}),
    "learned positions": (
        "gpt2", {"max_position_embeddings": 64}, {}, "set train.max_length=64", {"train.max_length": 64}
    ),
    "the mask alone": (
        "stablelm", {}, {}, "set model.attention=idlm_sdpa", {"model.attention": "idlm_sdpa"}
    ),
    "the mask alone, gated": (
        "stablelm", {}, GATED_LORA | {"model.attention": "idlm_sdpa"},
        "an adapter needs adapter.gated=false and export.merge=true",
        PLAIN_LORA | {"model.attention": "idlm_sdpa"},
    ),
    "attention of a GPU": (
        "qwen3", {}, {"model.attention": "idlm_flex"}, "use auto", {"model.attention": "auto"}
    ),
    "targets": (
        "qwen3", {}, PLAIN_LORA | {"adapter.targets": "[query]"}, "choose from down_proj",
        PLAIN_LORA | {"adapter.targets": "[down_proj]"},
    ),
    "no row for a merged adapter": (
        "qwen3", {"vocab_size": 165}, PLAIN_LORA, "adapter.gated=true and export.merge=false",
        PLAIN_LORA | {"adapter.gated": "true", "export.merge": "false"},
    ),
    "a merged gated adapter": (
        "qwen3", {}, GATED_LORA | {"export.merge": "true"}, "leave it out", GATED_LORA
    ),
    "an adapter that is not published": (
        "qwen3", {}, PLAIN_LORA | {"export.merge": "false"}, "set export.merge=true", PLAIN_LORA
    ),
    "a weight of a frozen loss": (
        "qwen3", {}, GATED_LORA | {"train.stages": "[{stride: 2, steps: 1, clean_weight: 1}]"},
        "leave clean_weight out or set it to 0",
        GATED_LORA | {"train.stages": "[{stride: 2, steps: 1, clean_weight: 0}]"},
    ),
    "weights of 16 bits": (
        "qwen3", {}, {"model.dtype": "bfloat16"}, "add train.zero_stage=1",
        {"model.dtype": "float32", "train.bf16": "true"},
    ),
    "compiled parts of weights": (
        "qwen3", {}, {"model.compile": "on", "train.zero_stage": 3}, "set model.compile=auto",
        {"model.compile": "auto"},
    ),
    "a row outside": (
        "qwen3", {}, {"model.mask_token_id": 500}, "give an id inside this range",
        {"model.mask_token_id": MASK_ROW},
    ),
    "a row in use": (
        "qwen3", {}, {"model.mask_token_id": 40}, "a row after the tokenizer's last id",
        {"model.mask_token_id": MASK_ROW},
    ),
    "rows of a step": (
        "qwen3", {}, {"train.global_batch": 7, "train.batch_size": 2}, "set train.batch_size=1",
        {"train.global_batch": 7, "train.batch_size": 1},
    ),
    "two ways to accumulate": (
        "qwen3", {}, {"train.global_batch": 4, "train.accumulation": 3}, "give one of them",
        {"train.global_batch": 4},
    ),
    "one mask of all rows": (
        "qwen3", {}, GATED_LORA | {"model.attention": "idlm_sdpa", "train.batch_size": 2},
        "train.batch_size=1 and a larger train.accumulation",
        GATED_LORA | {"model.attention": "idlm_sdpa", "train.batch_size": 1, "train.accumulation": 2},
    ),
    "samples that are too long": (
        "qwen3", {}, {"train.max_length": 8}, "set train.overlong=drop, truncate",
        {"train.max_length": 8, "train.overlong": "truncate"},
    ),
}  # fmt: skip


@pytest.mark.sweep_but("learned positions")
@pytest.mark.parametrize("name", BY_SETTINGS)
def test_a_setting_that_is_advised_prepares_the_run(name: str, tmp_path: Path) -> None:
    family, fields, broken, words, fixed = BY_SETTINGS[name]
    base = write_base(tmp_path / "base", family, **fields)
    refused = of_the_run(config_of(base, tmp_path / "out", **broken))
    assert refused is not None and words in f"{refused.message}\n{refused.fix}"
    assert of_the_run(config_of(base, tmp_path / "out", **fixed)) is None


def _as_bin(base: Path) -> None:
    torch.save(load_file(base / "model.safetensors"), base / "pytorch_model.bin")
    (base / "model.safetensors").unlink()


def _write(name: str, content: str) -> Callable[[Path], None]:
    def apply(base: Path) -> None:
        (base / name).unlink(missing_ok=True)
        (base / name).write_text(content)

    return apply


def _restored(name: str) -> Callable[[Path, Path, str], None]:
    def apply(base: Path, whole: Path, fix: str) -> None:
        shutil.copy(whole / name, base / name)

    return apply


def _removed(name: str) -> Callable[[Path, Path, str], None]:
    def apply(base: Path, whole: Path, fix: str) -> None:
        (base / name).unlink()

    return apply


def _command(base: Path, whole: Path, fix: str) -> None:
    """Run the program that the fix gives."""
    arguments = shlex.split(fix.partition("convert it: python ")[2])
    subprocess.run([sys.executable, *arguments], check=True, capture_output=True)


def _generation(base: Path) -> None:
    GenerationConfig(eos_token_id=2).save_pretrained(base)
    path = base / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"max_new_tokens": 0}))


# name: (what is done to the base, words of the error and its fix, what the fix says).
BY_FILES: dict[str, tuple[Callable[[Path], None], str, Callable[[Path, Path, str], None]]] = {
    "pickled weights": (_as_bin, "if you trust it, convert it", _command),
    "weights of llama.cpp": (
        lambda base: (base / "model.safetensors").rename(base / "model.gguf") and None,
        "download the checkpoint that it was made from",
        _restored("model.safetensors"),
    ),
    "cut weights": (
        lambda base: (base / "model.safetensors").write_bytes(b"12345678{"),
        "download or copy the file again",
        _restored("model.safetensors"),
    ),
    "no weights": (
        lambda base: (base / "model.safetensors").unlink(),
        "download or copy the safetensors files",
        _restored("model.safetensors"),
    ),
    "a missing tensor": (
        weights(lambda tensors: tensors.pop("lm_head.weight")),
        "download all weight files",
        _restored("model.safetensors"),
    ),
    "other layers": (
        with_keys(intermediate_size=64), "use the config.json that belongs", _restored("config.json")
    ),
    "quantised": (
        with_keys(quantization_config={"quant_method": "awq", "bits": 4}),
        "use the checkpoint that it was made from",
        _restored("config.json"),
    ),
    "quantised elsewhere": (
        _write("quantize_config.json", "{}"),
        "use the checkpoint that it was made from",
        _removed("quantize_config.json"),
    ),
    "an unknown family": (with_keys(model_type="qwen99"), "restore config.json", _restored("config.json")),
    "cut configuration": (_write("config.json", "{"), "restore the file", _restored("config.json")),
    "no configuration": (
        lambda base: (base / "config.json").unlink(), "config.json", _restored("config.json")
    ),
    "more layers than tensors": (
        with_keys(num_hidden_layers=9999), "use the config.json that belongs", _restored("config.json")
    ),
    "an unknown key": (
        with_keys(expert_softcap=3.0), "take a key out of config.json", _restored("config.json")
    ),
    "sampling": (_generation, "correct the file, or remove it", _removed("generation_config.json")),
    "no tokenizer": (
        lambda base: [path.unlink() for path in base.glob("*token*")] and None,
        "copy the tokenizer files into the checkpoint directory",
        lambda base, whole, fix: [shutil.copy(path, base) for path in whole.glob("*token*")] and None,
    ),
}  # fmt: skip


@pytest.mark.sweep
@pytest.mark.parametrize("name", BY_FILES)
def test_a_repair_that_is_advised_prepares_the_run(name: str, tmp_path: Path) -> None:
    breaks, words, repairs = BY_FILES[name]
    whole, base = write_base(tmp_path / "whole"), tmp_path / "base"
    shutil.copytree(whole, base)
    breaks(base)
    config = config_of(base, tmp_path / "out")
    refused, problems = of_the_run(config), of_the_dry_run(config)[0]
    assert refused is not None and words in f"{refused.message}\n{refused.fix}"
    assert " ".join(refused.message.split()) in " ".join(str(problems).split()), "the dry run says the same"
    repairs(base, whole, refused.fix)
    assert of_the_run(config) is None


def test_an_attention_that_the_base_names_is_not_needed(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base")
    with_keys(attn_implementation="flash_attention_3")(base)
    config = config_of(base, tmp_path / "out")
    assert of_the_run(config) is None and not of_the_dry_run(config)[0]


def test_an_adapter_has_a_base(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base")
    new = {"model.path": "null", "model.tokenizer": base, "model.config.model_type": "qwen3"}
    config = config_of(base, tmp_path / "out", **new, **GATED_LORA)
    refused = of_the_run(config)
    assert refused is not None and "its base is stored nowhere" in refused.message
    assert of_the_run(config_of(base, tmp_path / "out", **GATED_LORA)) is None, "give model.path"


@pytest.mark.sweep_but("generation_config.json")
@pytest.mark.parametrize("fix", ["generation_config.json", "the chat template"])
def test_answers_that_never_end_get_an_end(fix: str, tmp_path: Path) -> None:
    """The template closes a turn with <|im_end|> (id 2), and the tokenizer's eos is <|endoftext|> (id 0)."""
    base = write_base(tmp_path / "base", vocab_size=384, eos_token_id=0)
    save_byte_level(base)
    path, data = base / "tokenizer_config.json", tmp_path / "data.jsonl"
    values = json.loads(path.read_text()) | {"eos_token": "<|endoftext|>"}
    path.write_text(json.dumps(values))
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    data.write_text((json.dumps({"messages": turns}) + "\n") * 4)
    config = config_of(base, tmp_path / "out")
    problems = str(of_the_dry_run(config)[0])
    assert "IDLM-0234" in problems and "close a turn with eos, or add the id" in problems
    if fix == "generation_config.json":
        (base / fix).unlink(missing_ok=True)
        (base / fix).write_text(json.dumps({"eos_token_id": [0, 2]}))
    else:
        template = values["chat_template"].replace("<|im_end|>", "<|endoftext|>")
        path.write_text(json.dumps(values | {"chat_template": template}))
    assert of_the_dry_run(config)[0] is None


def test_a_mask_in_the_text_is_removed_or_another_is_chosen(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base", vocab_size=384)
    save_byte_level(base)
    path, data = base / "tokenizer_config.json", tmp_path / "data.jsonl"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"mask_token": "<|endoftext|>"}))
    record = json.dumps({"prompt": "a", "response": "b<|endoftext|>c"}) + "\n"
    data.write_text(4 * record)
    config = config_of(base, tmp_path / "out")
    refused = of_the_run(config)
    assert refused is not None and "or choose another model.mask_token_id" in refused.fix
    assert of_the_run(config_of(base, tmp_path / "out", **{"model.mask_token_id": 350})) is None
    data.write_text(4 * record.replace("<|endoftext|>", ""))
    assert of_the_run(config) is None
