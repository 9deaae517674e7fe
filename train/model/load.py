"""The model that training starts from: new, or read from a checkpoint directory, and how it is compiled.

transformers fills tensors that a checkpoint lacks with random numbers; here that is an error. Decoder layers
are compiled one by one: they share their code, so one compilation serves all of them; the rest (wrappers,
hooks on the head, gathering of rows) stays eager, because compiled code of the whole model would depend on
the number of documents and supervised rows.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from idlm.checkpoint import read_json, verify
from idlm.config_keys import refuse_impossible_counts, refuse_unknown_keys
from idlm.errors import UserError, some_of
from idlm.log import rank
from idlm.train.model.attention import leave_out_of_compiled_layers, register_attention
from idlm.train.model.files import num_tensors, savable

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)
COMPILE_CHOICES = ("auto", "on", "off")
WEIGHT_SHARDING_STAGE = 3


def load_base(path: str, *, attention: str, dtype: torch.dtype) -> PreTrainedModel:
    """A causal language model from a local checkpoint directory, with parameters of `dtype`. Only safetensors
    are read. UserError IDLM-0302 and 0303: damaged files, 0501: no checkpoint, 0541: unreadable, or its
    tensors are not those of its config.json, and those of `check_base_config`.
    """
    from transformers import AutoModelForCausalLM

    directory = Path(path)
    if not (directory / "config.json").is_file():
        raise UserError(
            "IDLM-0501",
            f"model.path={path} is not a checkpoint directory: it has no config.json",
            fix="give the directory with config.json and the safetensors files; hub names are not downloaded",
        )
    check_base_config(directory)
    if rank() == 0:
        verify(directory, required=False)
    register_attention()
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=dtype,
            attn_implementation=attention,
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
        )
    # The exceptions that transformers, its validators and safetensors raise have no common base class.
    except Exception as error:
        if attention in str(error):
            raise UserError(
                "IDLM-0505",
                f"the architecture of model.path={path} does not let its attention be chosen ({error})",
                fix="use a causal model of transformers with standard attention layers",
            ) from error
        raise UserError(
            "IDLM-0541",
            f"model.path={path} cannot be loaded: {type(error).__name__}: {error}",
            fix="restore config.json and the safetensors files from their source; the architecture must be a "
            "causal language model that transformers knows",
        ) from error
    _require_complete(path, report)
    if model.generation_config is not None:
        model.generation_config = savable(model.generation_config, directory)
    return model


def check_base_config(directory: Path) -> None:
    """Refuse a config.json with a key that changes the arithmetic and that transformers would ignore
    (UserError IDLM-0618), or with more layers than the weight files can hold (IDLM-0603). Reads no weights.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config, source = read_json(directory / "config.json"), f"{directory}/config.json"
    held = num_tensors(directory)
    if held is not None:
        layers = {"num_hidden_layers": config.get("num_hidden_layers")}
        refuse_impossible_counts(layers, held, source=source)
    model_type = config.get("model_type")
    # transformers itself reports a model type that it does not know.
    if isinstance(model_type, str) and model_type in CONFIG_MAPPING:
        kind = CONFIG_MAPPING[model_type]
        known = {*kind().to_dict(), *kind.attribute_map, "quantization_config"}
        refuse_unknown_keys(config, known, source=source)


def _require_complete(path: str, report: Mapping[str, Any]) -> None:
    problems = [
        f"{len(names)} {what}: {some_of(sorted(map(str, names)))}"
        for what, names in (
            ("missing", report["missing_keys"]),
            ("not used", report["unexpected_keys"]),
            ("of the wrong shape", report["mismatched_keys"]),
        )
        if names
    ]
    if problems:
        raise UserError(
            "IDLM-0541",
            f"the tensors of model.path={path} do not fit its config.json; {'; '.join(problems)}",
            fix="use the config.json that belongs to these weights, and download all weight files",
        )


def create_base(
    config_values: dict[str, Any],
    *,
    attention: str,
    dtype: torch.dtype,
    seed: int,
    device: torch.device | None = None,
) -> PreTrainedModel:
    """A randomly initialised model from `model.config` (`model_type` and the fields of that family).

    On `device` its weights are drawn there: a model of billions takes minutes on a CPU.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    values = dict(config_values)
    model_type = values.pop("model_type", None)
    if model_type is None:
        raise UserError(
            "IDLM-0502", "model.config has no model_type", fix="add it, for example model_type: qwen3"
        )
    try:
        config = AutoConfig.for_model(model_type, **values)
    except (ValueError, TypeError) as error:
        raise UserError("IDLM-0502", f"model.config: {error}", fix="correct model.config") from error
    register_attention()
    torch.manual_seed(seed)
    try:
        with torch.device(device or "cpu"):
            return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    except ValueError as error:
        raise UserError("IDLM-0502", f"model.config: {error}", fix="correct model.config") from error


def compiles(choice: str, device: torch.device, *, zero_stage: int | None) -> bool:
    """Whether to compile the layers for `model.compile` = `choice`; `auto`: on a GPU, except under ZeRO-3.

    ZeRO-3 gathers and frees the weights of every layer in hooks, which compiled code would not see.
    UserError IDLM-0540 for choice "on" under ZeRO-3.
    """
    moves_weights = zero_stage == WEIGHT_SHARDING_STAGE
    if choice == "on" and moves_weights:
        raise UserError(
            "IDLM-0540",
            "model.compile=on does not go with train.zero_stage=3, which moves weights in and out of layers",
            fix="set model.compile=auto (eager layers under ZeRO-3), or train.zero_stage=2",
        )
    return choice == "on" or (choice == "auto" and device.type == "cuda" and not moves_weights)


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The model's decoder layers: the outermost module list of their number, whatever its name."""
    wanted = model.config.get_text_config().num_hidden_layers
    lists = (module for module in model.modules() if isinstance(module, nn.ModuleList))
    found = next((module for module in lists if len(module) == wanted), None)
    assert found is not None, f"no list of {wanted} layers in {type(model).__name__}"
    return found


def compile_layers(model: PreTrainedModel) -> int:
    """Compile every decoder layer in place, at its first use; returns how many. Shapes are static, unless a
    gated adapter runs clean and noisy rows apart, whose numbers differ from batch to batch.
    """
    layers, gate = decoder_layers(model), getattr(model, "mask_gate", None)
    runs_apart = gate is not None and gate.is_gated
    if runs_apart and model.config._attn_implementation != "idlm_split":
        leave_out_of_compiled_layers()
    for layer in layers:
        layer.compile(dynamic=runs_apart)
    log.info("compiling %d decoder layers", len(layers))
    return len(layers)
