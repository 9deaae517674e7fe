"""The model that training starts from: new, or read from a checkpoint directory, and how it is compiled.

transformers fills tensors that a checkpoint lacks with random numbers; here that is an error. Decoder layers
are compiled one by one: they share their code, so one compilation serves all of them; the rest (wrappers,
hooks on the head, gathering of rows) stays eager, because compiled code of the whole model would depend on
the number of documents and supervised rows."""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from idlm.checkpoint import read_json, refuse_impossible_counts, refuse_unknown_keys, verify, warn_of_adapter
from idlm.errors import UserError, naming, some_of
from idlm.log import rank
from idlm.text.tokenizer import check_vocabulary
from idlm.train.config.schema import TrainConfig
from idlm.train.distributed.deepspeed import SHARDS_WEIGHTS, num_parameters, zero_stage
from idlm.train.model.attention import leave_out_of_compiled_layers, register_attention
from idlm.train.model.checks import check_positions, check_window
from idlm.train.model.graphs import BodyGraphs, can_capture, is_short, replays, share_inputs
from idlm.train.model.stored import (
    base_tensors,
    read_generation_config,
    readable_tensors,
    refuse_quantised,
    savable,
    without_equal_copies,
)

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

log = logging.getLogger(__name__)
PARTS = re.compile("vision|image|video|audio|speech")
READ_AS_LAYER_TYPES = ("sliding_window_pattern", "_sliding_window_pattern")
"""Keys of Gemma 3 and Cohere 2 from which transformers derives `layer_types`."""


def base_config(path: str) -> PretrainedConfig:
    """The configuration of a base. UserError IDLM-0541 where it cannot be read; also `check_base_config`."""
    from transformers import AutoConfig

    check_base_config(Path(path))
    fix = "restore config.json; the architecture must be one that transformers supports"
    with naming("IDLM-0541", f"{path}/config.json cannot be read", fix=fix):
        config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    # The run chooses it: the package that a file names need not be installed.
    config._attn_implementation = None
    return config


def causal_class(config: PretrainedConfig) -> type[PreTrainedModel]:
    """transformers' causal language model of `config`; UserError IDLM-0505 where there is none, or it is part
    of a model that reads more than text."""
    from transformers import AutoModelForCausalLM

    name = config.model_type
    parts = [part for part in config.sub_configs if PARTS.search(part) and getattr(config, part, None)]
    found: Any = AutoModelForCausalLM._model_mapping.get(type(config), None)
    if getattr(config, "is_encoder_decoder", False):
        why = f"{name} has an encoder and a decoder, of which a text would need both"
    elif found is None:
        why = f"transformers has no causal language model of {name}"
    elif parts:
        why = f"{name} reads more than text ({', '.join(parts)}), and training on text would lose that part"
    else:
        return found[0] if isinstance(found, tuple) else found
    raise UserError(
        "IDLM-0505", why, fix="use a causal language model of text alone, such as llama, qwen3 or gemma3_text"
    )


def load_base(path: str, *, attention: str, dtype: torch.dtype, is_planned: bool = False) -> PreTrainedModel:
    """A causal language model from a local checkpoint directory, with parameters of `dtype`. Only safetensors
    are read; `is_planned`: only their headers, for a model on the meta device. UserError as in `base_config`
    and `base_tensors`, IDLM-0302 and 0303: damaged files, 0505: its attention cannot be chosen, 0541: its
    tensors are not those of its config.json."""
    directory, config = Path(path), base_config(path)
    model_class, stored = causal_class(config), base_tensors(directory)
    if rank() == 0:
        verify(directory, required=False)
        warn_of_adapter(directory)
    register_attention()
    # Before transformers reads it: its errors name no file.
    generation = read_generation_config(directory)
    given: dict[str, Any] = {"pretrained_model_name_or_path": path, "use_safetensors": True}
    try:
        with _quiet():
            if is_planned:
                tensors = without_equal_copies(stored, tied_names(config, model_class))
                values = {name: torch.empty(one.shape, device="meta") for name, one in tensors.items()}
                given = {"pretrained_model_name_or_path": None, "state_dict": values}
                given["device_map"] = {"": "meta"}
            model, report = model_class.from_pretrained(
                **given,
                config=config,
                dtype=dtype,
                attn_implementation=attention,
                ignore_mismatched_sizes=True,
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
            fix="restore config.json and the safetensors files from their source",
        ) from error
    _require_complete(path, report)
    _log_whether_tied(model, path)
    if generation is None and model.generation_config is not None:
        generation = savable(model.generation_config, directory)
    model.generation_config = generation
    return model


def check_base_config(directory: Path) -> None:
    """Refuse a config.json of quantised weights (UserError IDLM-0544), with a key that changes the arithmetic
    and that transformers would ignore (0618), or with more layers than the weight files can hold (0603). No
    weights are read."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config, source = read_json(directory / "config.json"), f"{directory}/config.json"
    refuse_quantised(directory, config)
    if tensors := readable_tensors(directory):
        layers = {"num_hidden_layers": config.get("num_hidden_layers")}
        refuse_impossible_counts(layers, len(tensors), source=source)
    model_type = config.get("model_type")
    # transformers itself reports a model type that it does not support.
    if isinstance(model_type, str) and model_type in CONFIG_MAPPING:
        kind = CONFIG_MAPPING[model_type]
        known = {*kind().to_dict(), *kind.attribute_map, "quantization_config", *READ_AS_LAYER_TYPES}
        refuse_unknown_keys(config, known, source=source)


@contextmanager
def _quiet() -> Iterator[None]:
    """Inside, transformers prints no progress and no report: `_require_complete` reports what is wrong."""
    from transformers.utils import logging as theirs

    level, shows_progress = theirs.get_verbosity(), theirs.is_progress_bar_enabled()
    theirs.set_verbosity_error()
    theirs.disable_progress_bar()
    try:
        yield
    finally:
        theirs.set_verbosity(level)
        if shows_progress:
            theirs.enable_progress_bar()


def tied_names(config: PretrainedConfig, model_class: type[PreTrainedModel]) -> dict[str, str]:
    """Names of weights that `config` ties, each with that of the weight that it is tied to."""
    with torch.device("meta"):
        return dict(model_class(copy.deepcopy(config)).all_tied_weights_keys)


def _require_complete(path: str, report: Mapping[str, Any]) -> None:
    wrong = [f"{name} is {list(held)}, not {list(made)}" for name, held, made in report["mismatched_keys"]]
    problems = [
        f"{len(names)} {what}: {some_of(sorted(names))}"
        for what, names in (
            ("missing", report["missing_keys"]),
            ("not used", report["unexpected_keys"]),
            ("of the wrong shape", wrong),
        )
        if names
    ]
    if problems:
        raise UserError(
            "IDLM-0541",
            f"the tensors of model.path={path} do not fit its config.json; {'; '.join(problems)}",
            fix="use the config.json that belongs to these weights, and download all weight files",
        )


def _log_whether_tied(model: PreTrainedModel, path: str) -> None:
    """Correct a config.json with tied weights where the files hold a head of their own: resizing
    and other tools would replace the head by the embedding."""
    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    config = model.config.get_text_config()
    if head is None or head.weight is table.weight or not getattr(config, "tie_word_embeddings", False):
        return
    for one in (config, model.config):
        one.tie_word_embeddings = False
    log.warning(
        "%s has tie_word_embeddings=true, but the weights have an output head of their own: it is trained, "
        "and the export has false",
        Path(path) / "config.json",
    )


def new_config(config_values: Mapping[str, Any]) -> PretrainedConfig:
    """The configuration that `model.config` gives; UserError IDLM-0502 where it gives none."""
    from transformers import AutoConfig

    values = dict(config_values)
    model_type = values.pop("model_type", None)
    if model_type is None:
        raise UserError(
            "IDLM-0502", "model.config has no model_type", fix="add it, for example model_type: qwen3"
        )
    with naming("IDLM-0502", "model.config", fix="correct model.config"):
        return AutoConfig.for_model(model_type, **values)


def random_model(
    config: PretrainedConfig | Mapping[str, Any],
    *,
    attention: str,
    dtype: torch.dtype,
    seed: int = 0,
    device: torch.device | None = None,
) -> PreTrainedModel:
    """A model with random weights, of a configuration or of the values of `model.config`; UserError IDLM-0502
    where these give none. It is drawn on `device`: one of billions of weights takes minutes on a CPU."""
    from transformers import AutoModelForCausalLM

    register_attention()
    config = new_config(config) if isinstance(config, Mapping) else config
    torch.manual_seed(seed)
    refusing = naming("IDLM-0502", "model.config", fix="correct model.config", of=ValueError)
    with refusing, torch.device(device or "cpu"):
        return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)


def compiles(config: TrainConfig, device: torch.device) -> bool:
    """Whether to compile the layers; model.compile=auto: on a GPU, except under ZeRO-3,
    which gathers and frees weights in hooks that compiled code would not see. UserError IDLM-0540 for "on"
    there."""
    choice, moves_weights = config.model.compile, zero_stage(config.train) == SHARDS_WEIGHTS
    if choice == "on" and moves_weights:
        raise UserError(
            "IDLM-0540",
            "model.compile=on does not go with train.zero_stage=3, which moves weights in and out of layers",
            fix="set model.compile=auto (eager layers under ZeRO-3), or train.zero_stage=2",
        )
    return choice == "on" or (choice == "auto" and device.type == "cuda" and not moves_weights)


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The model's decoder layers: the outermost module list of their number, whatever its name; UserError
    IDLM-0540 without one."""
    wanted = model.config.get_text_config().num_hidden_layers
    lists = (module for module in model.modules() if isinstance(module, nn.ModuleList))
    found = next((module for module in lists if len(module) == wanted), None)
    if found is None:
        raise UserError(
            "IDLM-0540",
            f"{type(model).__name__} has no list of {wanted} layers to compile",
            fix="set model.compile=off",
        )
    return found


def recompute_layers(model: PreTrainedModel, num: int | None) -> None:
    """Store no activations of the first `num` layers, None: of all, and compute them again backwards."""
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for layer in [] if num is None else decoder_layers(model)[num:]:
        vars(layer)["gradient_checkpointing"] = False


def compile_model(
    config: TrainConfig, model: PreTrainedModel, device: torch.device, *, row_length: int, world_size: int
) -> None:
    """Compile the layers, and capture graphs of them where the host may be slower than the device."""
    layers, num_rows = decoder_layers(model), config.train.batch_size * row_length
    if is_short(num_parameters(layers) / len(layers), num_rows=num_rows, is_gated=config.is_gated):
        share_inputs(layers)
        if replays(config.model.graphs, device, world_size=world_size) and can_capture(model):
            model.body_graphs = BodyGraphs(model)
    compile_layers(model)


def compile_layers(model: PreTrainedModel) -> int:
    """Compile every decoder layer in place, at its first use; returns how many. Shapes are static, unless a
    gated adapter runs clean and noisy rows apart, whose numbers differ from batch to batch."""
    layers, gate = decoder_layers(model), getattr(model, "mask_gate", None)
    runs_apart = gate is not None and gate.is_gated
    if runs_apart and model.config._attn_implementation != "idlm_split":
        leave_out_of_compiled_layers()
    # With dynamic shapes floats of modules would be inputs too: tensors on the CPU that every layer reads.
    torch._dynamo.config.specialize_float = True
    for layer in layers:
        layer.compile(dynamic=runs_apart)
    log.info("compiling %d decoder layers", len(layers))
    return len(layers)


def needed_attention(config: TrainConfig, attention: str) -> str:
    """The attention whose arguments a run needs: a gated adapter hands on more than a mask with any."""
    return "idlm_documents" if config.is_gated else attention


def check_fit(
    config: TrainConfig, model: PreTrainedModel, tokenizer: Any, device: torch.device, *, num_rows: int
) -> None:
    """Refuse a model, of `num_rows` embeddings in training, that does not fit the tokenizer and the settings;
    UserError IDLM-0213, 0509 and 0540. No values are read: the model may be on the meta device."""
    check_vocabulary(tokenizer, num_rows)
    check_window(model.config.get_text_config(), config.train.max_length)
    check_positions(model, config.train.max_length)
    if config.model.gradient_checkpointing and not model.supports_gradient_checkpointing:
        raise UserError(
            "IDLM-0540",
            f"model.gradient_checkpointing=true: {type(model).__name__} cannot recompute its layers",
            fix="set model.gradient_checkpointing=false",
        )
    if compiles(config, device):
        decoder_layers(model)


def require_row(config: TrainConfig, mask_token_id: int, num_rows: int) -> None:
    """UserError IDLM-0530 where an adapter is merged in the end and the embedding lacks the mask's row."""
    if config.adapter is not None and not config.is_gated and mask_token_id >= num_rows:
        raise UserError(
            "IDLM-0530",
            f"the base has no row for mask id {mask_token_id}, and an adapter that is merged adds none",
            fix="set model.mask_token_id to an unused token, or adapter.gated=true and export.merge=false",
        )
