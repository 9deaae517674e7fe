"""The dry run refuses of a base what the run refuses, in the same words, and passes what the run trains."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.unit.bases.agreement import (
    Change,
    config_of,
    of_the_dry_run,
    of_the_run,
    weights,
    with_keys,
    write_base,
)

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
PLAIN_LORA = {"adapter.rank": 4, "adapter.alpha": 8, "adapter.gated": "false", "export.merge": "true"}


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    folder = tmp_path_factory.mktemp("bases")
    return {
        "plain": write_base(folder / "plain"),
        "tied": write_base(folder / "tied", tie_word_embeddings=True),
        "moe": write_base(folder / "moe", "qwen3_moe", num_experts=4, num_experts_per_tok=2),
        "softcap": write_base(folder / "softcap", "gemma2", sliding_window=512),
        "stablelm": write_base(folder / "stablelm", "stablelm"),
        "learned": write_base(folder / "learned", "gpt2"),
    }


def quantised(**values: Any) -> Change:
    return with_keys(quantization_config=values)


def file(name: str, content: str) -> Change:
    def apply(base: Path) -> None:
        (base / name).write_text(content)

    return apply


def sharded(*, kept: int = 2, index: Callable[[dict[str, str]], dict[str, str]] = dict) -> Change:
    """Two files and their index, of which the first `kept` stay."""

    def apply(base: Path) -> None:
        tensors = load_file(base / "model.safetensors")
        (base / "model.safetensors").unlink()
        names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
        parts = {name: names[at % 2] for at, name in enumerate(sorted(tensors))}
        for name in names[:kept]:
            own = {tensor: value for tensor, value in tensors.items() if parts[tensor] == name}
            save_file(own, base / name, metadata={"format": "pt"})
        text = json.dumps({"metadata": {}, "weight_map": index(parts)})
        (base / "model.safetensors.index.json").write_text(text)

    return apply


def stored_head(scale: float) -> Change:
    return weights(lambda tensors: tensors.update({HEAD: scale * tensors[EMBEDDING]}))


def frequencies(tensors: dict[str, torch.Tensor]) -> None:
    for layer in range(2):
        tensors[f"model.layers.{layer}.self_attn.rotary_emb.inv_freq"] = torch.ones(4)


def as_codes(dtype: torch.dtype) -> Change:
    name = "model.layers.0.mlp.up_proj.weight"
    return weights(lambda tensors: tensors.update({name: tensors[name].to(dtype)}))


def nothing(base: Path) -> None:
    """Leave the base as it is."""


# base, what is done to it, changed settings, words of the refusal or None where it trains.
ANSWERS: dict[str, tuple[str, Change, dict[str, object], str | None]] = {
    "a cap on scores": ("softcap", nothing, {}, "cap on attention scores"),
    "the mask alone, gated": (
        "stablelm",
        nothing,
        {"model.attention": "idlm_sdpa", "adapter.rank": 4, "adapter.alpha": 8},
        "adapter.gated=false",
    ),
    "experts": ("moe", nothing, {}, None),
    "learned positions": ("learned", nothing, {}, None),
    "float8": ("plain", quantised(quant_method="fp8", activation_scheme="dynamic"), {}, "has fp8"),
    "an MLX copy": ("plain", with_keys(quantization={"bits": 4, "group_size": 64}), {}, "'bits': 4"),
    "float8 without a word": ("plain", as_codes(torch.float8_e4m3fn), {}, "holds F8_E4M3"),
    "no quantisation": ("plain", with_keys(quantization_config=None), {}, None),
    "old frequencies": ("plain", weights(frequencies), {}, None),
    "a surplus tensor": ("plain", weights(lambda t: t.update(more=torch.ones(1))), {}, "1 not used: more"),
    "an equal head": ("tied", stored_head(1), {}, None),
    "an equal head, plain LoRA": ("tied", stored_head(1), PLAIN_LORA, None),
    "a tied head": ("tied", nothing, {}, None),
    "two files": ("plain", sharded(), {}, None),
    "one file of two": ("plain", sharded(kept=1), {}, "model-00002-of-00002.safetensors"),
    "an index without one file": (
        "plain",
        sharded(index=lambda parts: {name: min(parts.values()) for name in parts}),
        {},
        "missing",
    ),
    "an index outside": ("plain", sharded(index=lambda parts: dict.fromkeys(parts, "../x")), {}, "../x"),
    "16 bits on a CPU": ("plain", nothing, {"model.attention": "idlm_split"}, "no backward pass on a CPU"),
}


@pytest.mark.sweep_but("the mask alone, gated", "float8 without a word")
@pytest.mark.parametrize("name", ANSWERS)
def test_the_dry_run_answers_as_the_run(name: str, bases: Mapping[str, Path], tmp_path: Path) -> None:
    kind, change, settings, words = ANSWERS[name]
    base = tmp_path / "base"
    shutil.copytree(bases[kind], base)
    change(base)
    config = config_of(base, tmp_path / "out", **settings)
    run, (problems, printed) = of_the_run(config), of_the_dry_run(config)
    if words is None:
        assert (run, problems) == (None, None)
        assert "# Stages" in printed
        return
    assert run is not None and problems is not None
    assert words in f"{run.message} {run.fix}"
    # The dry run indents the lines of a message.
    shown = " ".join(problems.split())
    assert " ".join(run.message.split()) in shown and " ".join(run.fix.split()) in shown
    assert "found 1 problem" in shown


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_planned_and_trained_models_are_tied_alike(
    dtype: str, bases: Mapping[str, Path], tmp_path: Path
) -> None:
    """Headers give the model that weights give: shapes, dtypes, and which weights are one."""
    from idlm.train.model.load import load_base

    for name, change in (("tied", stored_head(1)), ("tied", stored_head(2)), ("moe", nothing)):
        base = tmp_path / f"{name}{len(list(tmp_path.iterdir()))}"
        shutil.copytree(bases[name], base)
        change(base)
        options: dict[str, Any] = {"attention": "idlm_documents", "dtype": getattr(torch, dtype)}
        planned = load_base(str(base), is_planned=True, **options)
        loaded = load_base(str(base), **options)
        assert {value.device.type for value in planned.parameters()} == {"meta"}
        facts = [
            [(name, value.shape, value.dtype) for name, value in model.named_parameters()]
            for model in (planned, loaded)
        ]
        assert facts[0] == facts[1]
        assert planned.generation_config.to_dict() == loaded.generation_config.to_dict()
