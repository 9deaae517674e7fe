"""Models of random weights and true shapes, and what a pass over them reads and computes."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.shared import Report
from benchmarks.stream import Rates, measure_rates
from idlm.infer import build
from idlm.infer.decoders.base import Decoder
from idlm.infer.models.base import FAMILIES, Family, ModelSpec
from idlm.infer.models.dense import DenseLayer, DenseTrunk, Layer
from idlm.infer.models.loader import DTYPES, LoadedModel, make_trunk
from idlm.infer.models.moe import MoeLayer, check_blocks
from idlm.infer.parts import EngineParts
from idlm.infer.settings import EngineSettings
from idlm.semantics import Semantics

MAX_STRIDE = 32


def _shape(layers: int, width: int, ffn: int, heads: tuple[int, int, int], **more: Any) -> dict[str, Any]:
    """A config; `heads`: query heads, KV heads and head dim."""
    config = {
        "num_hidden_layers": layers,
        "hidden_size": width,
        "intermediate_size": ffn,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "head_dim": heads[2],
        "vocab_size": 151_936,
        "max_position_embeddings": 40_960,
    }
    return config | more


LLADA = {
    "architectures": ["LLaDAModelLM"],
    "model_type": "llada",
    "max_sequence_length": 4096,
    "rope_theta": 500_000.0,
    "rms_norm_eps": 1e-5,
    "rope": True,
    "layer_norm_type": "rms",
    "block_type": "llama",
    "activation_type": "silu",
    "weight_tying": False,
}
LLADA2 = {
    "architectures": ["LLaDA2MoeModelLM"],
    "num_shared_experts": 1,
    "first_k_dense_replace": 1,
    "score_function": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "partial_rotary_factor": 0.5,
    "use_qk_norm": True,
    "use_qkv_bias": False,
    "use_bias": False,
    "num_experts_per_tok": 8,
}
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
TINY = {"vocab_size": 96, "max_position_embeddings": 2048}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3-32b": _shape(64, 5120, 25600, (64, 8, 128)),
    "qwen3-8b": _shape(36, 4096, 12288, (32, 8, 128)),
    "qwen3-0.6b": _shape(28, 1024, 3072, (16, 8, 128)),
    "smollm2-135m": _shape(30, 576, 1536, (9, 3, 64), vocab_size=49_152, max_position_embeddings=8192)
    | LLAMA,
    "llama-1b": _shape(16, 2048, 8192, (32, 8, 64), vocab_size=128_256) | LLAMA,
    "tiny": _shape(2, 32, 64, (4, 2, 16), **TINY),
    # Released with 131,072 positions; the frequencies do not change the time.
    "llada22_mini": LLADA2
    | _shape(20, 2048, 5120, (16, 4, 128), vocab_size=157_184, max_position_embeddings=131_072)
    | {"num_experts": 256, "moe_intermediate_size": 512, "n_group": 8, "topk_group": 4}
    | {"expert_capacity": 48, "block_size": 32},
    "tiny_llada22": LLADA2
    | _shape(3, 32, 64, (4, 2, 16), **TINY, num_experts_per_tok=2)
    | {"num_experts": 8, "moe_intermediate_size": 16, "n_group": 2, "topk_group": 1}
    | {"expert_capacity": 4, "block_size": 8},
    "llada_8b": LLADA
    | {"d_model": 4096, "n_heads": 32, "n_kv_heads": 32, "n_layers": 32, "mlp_hidden_size": 12_288}
    | {"vocab_size": 126_464, "embedding_size": 126_464, "mask_token_id": 126_336},
    "dream_7b": _shape(28, 3584, 18_944, (28, 4, 128), vocab_size=152_064, max_position_embeddings=131_072)
    | {"architectures": ["DreamModel"], "model_type": "Dream", "is_causal": False, "mask_token_id": 151_666},
    "llada_moe": _shape(16, 2048, 8192, (16, 16, 128), vocab_size=157_184, max_position_embeddings=8192)
    | {"architectures": ["LLaDAMoEModelLM"], "model_type": "llada", "expert_intermediate_size": 1024}
    | {"dense_intermediate_size": 8192, "num_experts": 64, "num_experts_per_tok": 8, "qk_layernorm": True}
    | {"rope_theta": 50_000.0, "rms_norm_eps": 1e-5, "mask_token_id": 156_895},
    "tiny_llada": LLADA
    | {"d_model": 64, "n_heads": 4, "n_kv_heads": 4, "n_layers": 2, "mlp_hidden_size": 96}
    | {"vocab_size": 128, "embedding_size": 128, "mask_token_id": 127},
}
COMMON = {"rms_norm_eps": 1e-6, "rope_theta": 1e6, "hidden_act": "silu", "tie_word_embeddings": False}


def family_of(name: str) -> type[Family]:
    """The product's family of a model of `MODELS`."""
    return FAMILIES.get(MODELS[name].get("architectures", ["Qwen3ForCausalLM"])[0])


def model_spec(name: str, *, num_layers: int | None = None) -> ModelSpec:
    """The spec of a model of `MODELS`, with `num_layers` layers in place of its own."""
    spec = family_of(name).spec(COMMON | MODELS[name])
    return spec if num_layers is None else replace(spec, num_layers=num_layers)


def random_model(
    name: str,
    *,
    device: str,
    dtype: torch.dtype,
    block_size: int | None = None,
    num_layers: int | None = None,
) -> LoadedModel:
    """A model of `MODELS`, created on the device: matrices normal with variance 1 / columns, norms 1, biases
    0. It is block-causal with `block_size`; a causal one is converted, for strides up to `MAX_STRIDE`.
    UserError IDLM-0617 for blocks that its experts are not chosen by."""
    family, spec = family_of(name), model_spec(name, num_layers=num_layers)
    if spec.moe is not None:
        check_blocks(spec.moe, block_size=block_size)
    mask_id = MODELS[name].get("mask_token_id", spec.vocab_size - 1)
    if block_size is not None:
        semantics = Semantics(
            mask_token_id=mask_id, causality="block", block_size=block_size, logit_shift=False
        )
    elif family.causality == "full":
        semantics = family.semantics(MODELS[name])
    else:
        semantics = Semantics(mask_token_id=mask_id, stride=MAX_STRIDE)
    trunk = make_trunk(spec, device=torch.device(device), dtype=dtype)
    _fill_randomly(trunk)
    return LoadedModel(
        trunk=trunk,
        spec=spec,
        local=spec,
        semantics=semantics,
        architecture=MODELS[name].get("architectures", ["Qwen3ForCausalLM"])[0],
        dtype=dtype,
        device=torch.device(device),
        directory=Path(name),
    )


@dataclass(slots=True, kw_only=True)
class Bench:
    """Options, random model, measured rates and rows of a benchmark of the engine."""

    options: dict[str, str]
    report: Report
    rates: Rates
    model: LoadedModel

    def number(self, name: str) -> int:
        return int(self.options[name])


def opened(bench: str, options: dict[str, str], *, block_size: int | None = None) -> dict[str, Any]:
    """The fields of a `Bench`."""
    rates = measure_rates(options["device"])
    model = model_of(options, block_size=block_size)
    return {"options": options, "report": Report(bench, options), "rates": rates, "model": model}


def model_of(options: dict[str, str], *, block_size: int | None = None) -> LoadedModel:
    """The random model of a benchmark's `model`, `device`, `dtype` and, if it has them, `layers`; prints how
    long it took."""
    start, name, dtype = time.perf_counter(), options["model"], DTYPES[options["dtype"]]
    layers = int(options.get("layers") or 0) or None
    model = random_model(
        name, device=options["device"], dtype=dtype, block_size=block_size, num_layers=layers
    )
    print(f"random weights of {name} after {time.perf_counter() - start:.1f} s", flush=True)
    return model


def assembled(
    model: LoadedModel, decoder: Decoder, accelerators: Mapping[str, Any] | None = None, **settings: Any
) -> EngineParts:
    """The parts of an engine with a decoder, the Config of each accelerator and `EngineSettings`."""
    made = EngineSettings(device=str(model.device), **settings)
    return build._assemble(made, model, None, decoder, (), accelerators=accelerators or {})


def _fill_randomly(trunk: DenseTrunk) -> None:
    generator = torch.Generator(device=trunk.embed.device).manual_seed(0)
    for parameter_name, weight in trunk.named_parameters():
        if "norm" in parameter_name:
            weight.data.fill_(1.0)
        elif weight.ndim < 2:
            weight.data.zero_()
        else:
            weight.data.normal_(std=weight.shape[-1] ** -0.5, generator=generator)


def slot_bytes(model: LoadedModel) -> int:
    return 2 * model.local.num_layers * model.local.num_kv_heads * model.local.head_dim * model.dtype.itemsize


def weights_of(model: LoadedModel) -> list[Tensor]:
    """The matrices that every pass reads, in order, without the input embedding. Of experts as many as one
    row chooses: fewer bytes than a pass reads, but the products of every row."""
    found: list[Tensor] = []
    for layer in model.trunk.layers:
        assert isinstance(layer, Layer)
        found += [layer.qkv, layer.o]
        if isinstance(layer, DenseLayer):
            found += [layer.gate_up, layer.down]
        if isinstance(layer, MoeLayer):
            mlp, num = layer.mlp, layer.mlp.moe.num_chosen
            found += [mlp.router, mlp.gate_up[:num], mlp.down[:num]]
            found += [each for each in (mlp.shared_gate_up, mlp.shared_down) if each is not None]
    return [*found, model.trunk.head]


def weight_bytes(model: LoadedModel) -> int:
    return sum(weight.nbytes for weight in weights_of(model))


def free_bytes(model: LoadedModel) -> float:
    """Free memory of the model's GPU; without a GPU more than any benchmark needs."""
    return torch.cuda.mem_get_info(model.device)[0] if model.device.type == "cuda" else 1e12
