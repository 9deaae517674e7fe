"""Whether idlm can train an architecture, found out with a small model of it before weights are read.

The dry run and the run call `check_architecture` with the same configuration. It makes a model of the same
class with fewer and narrower layers and random weights on the CPU, and runs `check_model` on it, with a
backward pass. So the dry run executes the check of the run, and a run does not load a base that it refuses.
A run loads a small base at once, and checks that (`train.prepare.stands_for_itself`)."""

from __future__ import annotations

import copy
import itertools
import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from idlm.errors import UserError, naming
from idlm.train.model.attention import register_attention
from idlm.train.model.checks import check_model
from idlm.train.model.load import causal_class

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

log = logging.getLogger(__name__)
MAX_ELEMENTS = 30_000_000
"""Of a stand-in: 120 MB, drawn in less than a second. A smaller base stands for itself."""
MAX_WIDE_ELEMENTS = 500_000_000
"""Of a stand-in whose widths nothing can lower."""
ROWS_OF_VOCABULARY, WIDTH_OF_FFN, NUM_EXPERTS = 512, 128, 8
ON_A_CPU = {"idlm_split": "idlm_documents", "idlm_flex": "idlm_sdpa", "idlm_flash": "idlm_sdpa"}
"""What takes the same arguments on a CPU."""


def check_architecture(config: PretrainedConfig, *, attention: str) -> None:
    """Refuse an architecture that `attention` cannot train: UserError IDLM-0505, as in `check_model`."""
    model_class = causal_class(config)
    register_attention()
    attention = ON_A_CPU.get(attention, attention)
    refusal: UserError | None = None
    with torch.random.fork_rng(devices=[]):
        for small in _smaller(config, model_class):
            refusal = _refusal(small, model_class, attention)
            # An exception of the model may come from lower widths: the next and wider one decides.
            if refusal is None or refusal.__cause__ is None:
                break
    if refusal is not None:
        raise refusal


def _refusal(
    config: PretrainedConfig, model_class: type[PreTrainedModel], attention: str
) -> UserError | None:
    try:
        with _making(model_class):
            check_model(_make(config, model_class, attention), attention=attention, trains=True)
    except UserError as error:
        return error
    return None


def _making(model_class: type[PreTrainedModel]) -> AbstractContextManager[None]:
    what = f"{model_class.__name__} cannot be made from config.json"
    return naming("IDLM-0541", what, fix="restore config.json from its source")


def _smaller(config: PretrainedConfig, model_class: type[PreTrainedModel]) -> Iterator[PretrainedConfig]:
    """The configuration itself if the model is small; else smaller ones, the smallest first."""
    with _making(model_class):
        is_small = _num_elements(config, model_class) <= MAX_ELEMENTS
    if is_small:
        yield copy.deepcopy(config)
        return
    for narrows, shortens in itertools.product((True, False), repeat=2):
        values = config.to_dict()
        _lower(values, type(config), narrows=narrows, shortens=shortens)
        for name in config.sub_configs:
            if isinstance(values.get(name), dict):
                kind = type(getattr(config, name))
                _lower(values[name], kind, narrows=narrows, shortens=shortens)
        try:
            made = type(config).from_dict(values)
            if _num_elements(made, model_class) <= (MAX_ELEMENTS if narrows else MAX_WIDE_ELEMENTS):
                yield made
        except Exception as error:
            log.debug("no smaller %s: %s", config.model_type, error)


def _lower(section: dict[str, Any], kind: type[PretrainedConfig], *, narrows: bool, shortens: bool) -> None:
    """Lower the sizes of one section of a configuration in place; heads keep their width and their groups."""

    def given(name: str) -> Any:
        return section.get(kind.attribute_map.get(name, name))

    def lower(name: str, value: int) -> None:
        if isinstance(given(name), int) and given(name) > value:
            section[kind.attribute_map.get(name, name)] = value

    layers, heads = given("num_hidden_layers"), given("num_attention_heads")
    if shortens and isinstance(layers, int) and layers > 2:
        kept = _layers_of_all_kinds(section, layers)
        for name, value in section.items():
            if isinstance(value, list) and len(value) == layers:
                section[name] = [value[layer] for layer in kept]
        lower("num_hidden_layers", len(kept))
    for name, value in section.items():
        if name.endswith("vocab_size") or "vocab_size_" in name:
            lower(name, ROWS_OF_VOCABULARY)
        elif name.endswith(("token_id", "token_index")) and isinstance(value, int):
            lower(name, ROWS_OF_VOCABULARY - 1)
        elif name.endswith("token_id") and isinstance(value, list):
            section[name] = [min(one, ROWS_OF_VOCABULARY - 1) for one in value]
        elif narrows and any(part in name for part in ("intermediate", "ffn", "n_inner")):
            lower(name, WIDTH_OF_FFN)
        elif narrows and "expert" in name:
            lower(name, NUM_EXPERTS)
    if narrows and isinstance(heads, int) and heads > 1:
        keys = given("num_key_value_heads") if isinstance(given("num_key_value_heads"), int) else heads
        fewer, groups = min(2, keys), min(4, heads // keys)
        width = given("hidden_size")
        head_dim = given("head_dim") if isinstance(given("head_dim"), int) else (width or 0) // heads
        lower("num_attention_heads", groups * fewer)
        lower("num_key_value_heads", fewer)
        lower("hidden_size", groups * fewer * head_dim)


def _layers_of_all_kinds(section: dict[str, Any], layers: int) -> list[int]:
    """At least two layers, of every kind one, by the lists with an entry per layer."""
    lists = [value for value in section.values() if isinstance(value, list) and len(value) == layers]
    kinds = [repr(kind) for kind in zip(*lists, strict=True)] or [""] * layers
    first = sorted({kinds.index(kind) for kind in kinds})
    return first if len(first) > 1 else [0, 1]


def _num_elements(config: PretrainedConfig, model_class: type[PreTrainedModel]) -> int:
    with torch.device("meta"):
        model = model_class(copy.deepcopy(config))
    return sum(value.numel() for value in model.parameters())


def _make(config: PretrainedConfig, model_class: type[PreTrainedModel], attention: str) -> PreTrainedModel:
    """A float32 model on the CPU whose layers all matter: usual random weights would leave attention out."""
    config.dtype, config._attn_implementation = torch.float32, attention
    torch.manual_seed(0)
    try:
        model = model_class(config)
    except (ValueError, KeyError) as error:
        if attention not in str(error):
            raise
        raise UserError(
            "IDLM-0505",
            f"{model_class.__name__} does not let its attention be chosen ({error})",
            fix="use a causal model of transformers with standard attention layers",
        ) from error
    embeddings = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    with torch.no_grad():
        for value in model.parameters():
            if value.dim() > 1:
                value.normal_(std=1.0 if value in embeddings else value.shape[-1] ** -0.5)
    return model
