"""What `-h` and `describe=` of the commands that load an engine print, with all decoder options."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import importlib.metadata
import inspect
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from idlm.cli.help import CommandHelp, show_default
from idlm.contracts import SamplingParams
from idlm.errors import UserError
from idlm.infer.cli.config import EngineArguments, GenerateConfig
from idlm.infer.settings import EngineOptions, check_options
from idlm.registry import Registry

if TYPE_CHECKING:
    from idlm.infer.decoders.base import Decoder
    from idlm.infer.models.loader import Outline

PLUGINS = {
    "decoder": ("idlm.infer.decoders", "idlm.infer.decoders.base", "DECODERS"),
    "accelerator": ("idlm.infer.accelerators", "idlm.infer.sparse.accelerator", "ACCELERATORS"),
}
"""Folder of each kind of plug-in, and module and name of its registry."""
FORMS = {
    "decoder": ("decoder={}", "decoder."),
    "accelerator": ("accelerators=[{}]", "accelerators.{}."),
}
"""How a plug-in of each kind is chosen, and what its options begin with."""
PLUGIN_FLAGS = {
    "decoder=NAME decoder.OPTION=VALUE": "how to decode: ar, isd, block or full; the options are at the end",
    "accelerators=[NAME,...]": "plug-ins that compute sparse attention; the options are at the end",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineHelp(CommandHelp):
    """The help of a command that loads an engine, with the options of all decoders and accelerators."""

    flags: dict[str, str] = dataclasses.field(default_factory=PLUGIN_FLAGS.copy)

    def plugin_keys(self) -> list[str]:
        keys = ["decoder"]
        for kind, (_, prefix) in FORMS.items():
            for name, plugin in plugins_of(kind).items():
                keys += [f"{prefix.format(name)}{option}" for option in plugin.defaults]
        return list(dict.fromkeys(keys))

    def plugin_text(self) -> str:
        lines = ["Decoders and accelerators:"]
        for kind, (choice, prefix) in FORMS.items():
            for name, plugin in plugins_of(kind).items():
                lines += _described(plugin, choice.format(name), prefix.format(name))
        return "\n".join(lines)


class PluginHelp(NamedTuple):
    """The docstring of a plug-in's Config, and its options with their defaults."""

    text: str
    defaults: dict[str, Any]


def _described(plugin: PluginHelp, choice: str, prefix: str) -> list[str]:
    options = [f"{prefix}{name}={show_default(value)}" for name, value in plugin.defaults.items()]
    details = [", ".join(options) or "no options", *(plugin.text.splitlines() if options else [])]
    return [choice, *(f"    {line}".rstrip() for line in details)]


def plugins_of(kind: str) -> dict[str, PluginHelp]:
    """Every decoder or accelerator, by name. Plug-ins import torch, which takes seconds: their options are
    read from their source, unless it has another form than usual or another package adds plug-ins."""
    package, module, registry = PLUGINS[kind]
    if not importlib.metadata.entry_points(group=f"idlm.{kind}s"):
        try:
            return from_sources(package, registry)
        except (LookupError, ValueError):
            pass
    return from_registry(getattr(importlib.import_module(module), registry))


def from_registry(registry: Registry[Any]) -> dict[str, PluginHelp]:
    configs = {name: registry.get(name).Config for name in registry.names()}
    found = {}
    for name, config in configs.items():
        defaults = {field.name: field.default for field in dataclasses.fields(config)}
        found[name] = PluginHelp(inspect.getdoc(config) or "", defaults)
    return found


def from_sources(package: str, registry: str) -> dict[str, PluginHelp]:
    """Read plug-ins of the usual form: `@REGISTRY.register("name")` on a class with `Config: ... =
    SomeConfig`, a dataclass of the package with literal defaults. ValueError or LookupError for others."""
    [folder] = importlib.import_module(package).__path__
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in Path(folder).glob("*.py")]
    classes = {node.name: node for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)}
    found = {}
    for plugin in classes.values():
        for decorator in plugin.decorator_list:
            if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == f"{registry}.register":
                chosen = {name: ast.unparse(value) for name, value in _assigned(plugin).items() if value}
                found[ast.literal_eval(decorator.args[0])] = _from_node(classes[chosen["Config"]])
    return dict(sorted(found.items()))


def _from_node(config: ast.ClassDef) -> PluginHelp:
    if config.bases:
        raise LookupError(f"{config.name} inherits options")
    defaults = {
        name: dataclasses.MISSING if value is None else ast.literal_eval(value)
        for name, value in _assigned(config).items()
    }
    return PluginHelp(ast.get_docstring(config) or "", defaults)


def _assigned(node: ast.ClassDef) -> dict[str, ast.expr | None]:
    return {ast.unparse(item.target): item.value for item in node.body if isinstance(item, ast.AnnAssign)}


def describe_model(config: GenerateConfig, arguments: EngineArguments) -> str:
    """What `describe=true` prints. Reports every mistake that can be detected without weights."""
    outline, checked, decoder = _read(arguments)
    accelerators = ", ".join(name + _values(each) for name, each in checked.accelerators.items())
    lines = [f"decoder     {decoder.name}{_values(decoder.config)}", f"accelerator {accelerators or 'none'}"]
    return "\n".join([*_description(outline), *lines])


def describe_memory(config: GenerateConfig, arguments: EngineArguments) -> str:
    """What `describe=memory` prints: the plan of a request's canvases of `max_length` rows, all of them
    wanted; then that of greedy passes, which store no logits. UserError IDLM-0472 for causal checkpoints."""
    from idlm.infer.build import resolve_device
    from idlm.infer.mosaic.canvas import canvas_shape, fused_head, library_bytes, workspace_bytes
    from idlm.infer.mosaic.chunking import plan_forward, trunk_forward
    from idlm.infer.mosaic.planner import describe_plan
    from idlm.infer.mosaic.template import Sizes
    from idlm.kernels.masked_logits import has_fused

    outline, _, decoder = _read(arguments)
    spec, semantics = outline.spec, outline.semantics
    if semantics.causality != "full":
        raise UserError(
            "IDLM-0472",
            f"describe=memory prints plans of full-diffusion passes; the checkpoint has causality="
            f"{semantics.causality!r}",
            fix="use describe=true, which prints how the checkpoint is read",
        )
    shape, num_canvases = canvas_shape(spec, outline.dtype), decoder.num_canvases(SamplingParams())
    num_rows = num_canvases * (config.max_length or spec.trained_length or spec.max_positions)
    weights = sum(prod(target.shape) for target in outline.targets.values()) * outline.dtype.itemsize
    device = resolve_device(config.device)
    capacity = workspace_bytes(shape, device) - (weights if device.type == "cuda" else 0)
    # The mixed logits of two canvases are no product of the head, so such passes store them.
    shapes = [shape, fused_head(shape)] if has_fused(device) and num_canvases == 1 else [shape]
    sizes = Sizes(length=num_rows, wanted=num_rows, group=num_canvases)
    others = f"weights {weights:,} bytes, libraries {library_bytes(shape):,} bytes at any length"
    plans = [describe_plan(plan_forward(trunk_forward(one), sizes, capacity=capacity)) for one in shapes]
    workspace = f"the workspace may have {capacity:,} bytes"
    return "\n".join([*plans, f"outside the workspace: {others}; {workspace}"])


def _read(arguments: EngineArguments) -> tuple[Outline, EngineOptions, Decoder]:
    from idlm.infer.build import read_checkpoint

    checked = check_options(arguments.decoder, arguments.settings | arguments.options)
    outline, decoder = read_checkpoint(arguments.model, checked)
    return outline, checked, decoder


def _values(config: Any) -> str:
    return f"({_fields(config)})" if dataclasses.fields(config) else ""


def _description(outline: Outline) -> list[str]:
    from idlm.infer.models.base import FAMILIES
    from idlm.infer.models.loader import SEMANTICS_FILE

    spec, meaning = outline.spec, outline.semantics
    family = FAMILIES.get(outline.architecture)
    directory = outline.adapters[0].directory if outline.adapters else outline.directory
    is_written = (directory / SEMANTICS_FILE).is_file()
    reordered = sorted(name for name, target in outline.targets.items() if target.order is not None)
    rotation = "nothing"
    if reordered:
        rotation = f"query and key dimensions in {len(reordered)} tensors, the first is {reordered[0]}: "
        rotation += f"{spec.rotary_dim} of {spec.head_dim} rotate"
    numbers = sum(prod(target.shape) for target in outline.targets.values())
    lines = [
        f"checkpoint  {outline.directory}, {len({one.path for one in outline.files.values()})} weight files",
        f"family      {outline.architecture} ({family.__module__.rpartition('.')[2]})",
        f"semantics   from {SEMANTICS_FILE if is_written else 'the family'}, mask_token_id as given or there",
        *(f"  {field.name}={getattr(meaning, field.name)!r}" for field in dataclasses.fields(meaning)),
        f"shape       dtype={str(outline.dtype).removeprefix('torch.')}, {_fields(spec)}",
        f"experts     {'none' if spec.moe is None else _fields(spec.moe)}",
        f"tensors     {len(outline.targets)} read, {numbers:,} numbers; none missing, none unused",
        f"ignored     {', '.join(outline.ignored) or 'nothing'}",
        f"reordered   {rotation}",
    ]
    ranks = ((adapter.directory, adapter.spec.rank) for adapter in outline.adapters)
    return lines + [f"adapter     {directory}, gated, rank {rank}" for directory, rank in ranks]


def _fields(values: Any) -> str:
    shown = [field.name for field in dataclasses.fields(values) if field.name not in ("rope_inv_freq", "moe")]
    return ", ".join(f"{name}={getattr(values, name)!r}" for name in shown)
