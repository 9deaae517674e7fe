"""LoRAs of PEFT whose modules differ in rank, scale or layers, as plain ones that compute the same.

A plain LoRA has one rank, one scale, and the same modules in every layer. Rows of zeros bring a rank to the
largest one, a factor of B takes a module's scale to the common one, and a module without adapter has one of
zeros. PEFT's rules are those of its `get_pattern_key` and `check_target_module_exists`.

Shape letters: D input width, E output width, r rank."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from idlm.config.schema import is_integer, is_number
from idlm.errors import UserError
from idlm.lora import MAX_RANK, tensor_name

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

MAX_LAYERS = 10_000
LAYER_KEYS = ("layers_to_transform", "layers_pattern", "exclude_modules")
PATTERN_KEYS = ("rank_pattern", "alpha_pattern")
WRAPPERS = re.compile(r"(?:(?<=\.)|^)(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|module)\.")
"""What torch.compile, FSDP, recomputation and DDP add to the names of the modules that they wrap."""
OF_A_MODEL = re.compile(r"(?:.*\bbase_model\.model\.)?(.+)\.lora_([AB])(?:\.(\w+))?\.weight")
"""Names in a whole model, where a matrix may have the name of its adapter, and in a file of PEFT."""
NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
"""The layer in the path of a module."""


def adapted_modules(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the paths of the modules that have an A, in the base."""
    return [match[1] for match in map(OF_A_MODEL.fullmatch, tensors) if match and match[2] == "A"]


def peft_names(tensors: Mapping[str, Tensor], *, origin: Path) -> dict[str, Tensor]:
    """Return tensors by the names that PEFT gives them in a file, also those saved with the names that they
    have in a model; UserError IDLM-0613 where these are of several adapters."""
    found, adapters = dict[str, Any](), set[str | None]()
    for name, tensor in tensors.items():
        path = WRAPPERS.sub("", name)
        if match := OF_A_MODEL.fullmatch(path):
            path = tensor_name(match[1], match[2])
            adapters.add(match[3])
        found[path] = tensor
    if len(adapters) > 1 or len(found) < len(tensors):
        raise UserError(
            "IDLM-0613",
            f"{origin} has tensors of several adapters, or several of one name: {sorted(map(str, adapters))}",
            fix="save one of them with peft's save_pretrained(selected_adapters=[...])",
        )
    return found


def plain_lora(
    content: Mapping[str, Any], tensors: Mapping[str, Tensor], *, base: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the `adapter_config.json` and the tensors of the plain LoRA on the base whose config is `base`;
    what cannot be made plain stays, for the checks to name it. re.error for a pattern that is not one,
    UserError IDLM-0613 for tensors of another rank than that of their pattern."""
    modules, given = adapted_modules(tensors), base.get("num_hidden_layers")
    num_layers = int(given or 0) if is_integer(given, 1, MAX_LAYERS) else 0
    plain = {key: value for key, value in content.items() if key not in LAYER_KEYS}
    if content.get("exclude_modules") and isinstance(names := plain.get("target_modules"), list):
        plain["target_modules"] = [one for one in names if any(_fits(module, [one]) for module in modules)]
    found = _of_one_rank_and_scale(plain, tensors, modules)
    added = {
        tensor_name(path, matrix): found[like].new_zeros(found[like].shape)
        for module, path in _untargeted(content, modules, num_layers)
        for matrix in "AB"
        if (like := tensor_name(module, matrix)) in found
    }
    return plain, found | added


def _of_one_rank_and_scale(
    plain: dict[str, Any], tensors: Mapping[str, Tensor], modules: list[str]
) -> dict[str, Tensor]:
    """Return the tensors with one rank and scale, which `plain` gets in place of its patterns."""
    from torch.nn.functional import pad

    found = dict(tensors)
    ranks, alphas = (plain.get(key) or {} for key in PATTERN_KEYS)
    are_patterns = isinstance(ranks, Mapping) and isinstance(alphas, Mapping) and (ranks or alphas)
    given = [plain.get("r"), *ranks.values()] if are_patterns else []
    scales = [plain.get("lora_alpha"), *alphas.values()] if are_patterns else []
    if not given or not all(is_integer(one, 1, MAX_RANK) for one in given) or not all(map(is_number, scales)):
        return found
    rank_of = {module: _own(ranks, module, plain["r"]) for module in modules}
    power = 0.5 if plain.get("use_rslora") else 1
    scale_of = {
        module: _own(alphas, module, plain["lora_alpha"]) / rank**power for module, rank in rank_of.items()
    }
    rank = max(rank_of.values(), default=plain["r"])
    # Most tensors stay as they are, bit for bit.
    scale = Counter(filter(None, scale_of.values())).most_common(1)
    common = scale[0][0] if scale else 1.0
    for module, own in rank_of.items():
        a, b = (tensor_name(module, matrix) for matrix in "AB")
        if b not in found:
            continue
        if (found[a].shape[0], found[b].shape[-1]) != (own, own):
            raise UserError(
                "IDLM-0613",
                f"adapter_config.json gives {module} the rank {own}, and its tensors have "
                f"{found[a].shape[0]} and {found[b].shape[-1]}",
                fix="copy the adapter again from its source",
            )
        if (factor := scale_of[module] / common) != 1:
            found[b] = (found[b].double() * factor).to(found[b].dtype)
        found[a], found[b] = pad(found[a], (0, 0, 0, rank - own)), pad(found[b], (0, rank - own))
    for key in PATTERN_KEYS:
        plain.pop(key, None)
    plain |= {"r": rank, "lora_alpha": common * rank, "use_rslora": False}
    return found


def _own(patterns: Mapping[str, Any], module: str, default: Any) -> Any:
    """Return the value of the first pattern that fits the path of a module, as in PEFT."""
    return next((v for key, v in patterns.items() if re.match(rf"(.*\.)?({key})$", module)), default)


def _untargeted(content: Mapping[str, Any], modules: list[str], num_layers: int) -> list[tuple[str, str]]:
    """Return (a module of another layer, path) of each module that the config leaves out in some layers."""
    layered = filter(NUMBER.search, modules)
    forms = {NUMBER.sub("{}", module, count=1): module for module in layered}
    paths = [(module, form.format(layer)) for form, module in forms.items() for layer in range(num_layers)]
    known = set(modules)
    return [(module, path) for module, path in paths if path not in known and not _is_targeted(path, content)]


def _is_targeted(path: str, content: Mapping[str, Any]) -> bool:
    """Return whether PEFT adapts the module at `path`."""
    layers, number = content.get("layers_to_transform"), NUMBER.search(path)
    wanted = layers if isinstance(layers, list) else [layers]
    is_in_layer = layers in (None, []) or number is None or int(number[0]) in wanted
    target, exclude = content.get("target_modules"), content.get("exclude_modules")
    return not _fits(path, exclude) and is_in_layer and _fits(path, target)


def _fits(path: str, names: Any) -> bool:
    if isinstance(names, str):
        return names == "all-linear" or re.fullmatch(names, path) is not None
    return isinstance(names, list) and any(f".{path}".endswith(f".{name}") for name in names)
