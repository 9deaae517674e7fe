"""Help on decoders, accelerators and their options.

Plug-ins import torch, which takes seconds, so their options are read from their source. They are imported
only if a source has another form than usual, or when another package adds plug-ins.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import importlib.metadata
import importlib.util
import inspect
import pkgutil
from dataclasses import dataclass
from typing import Any

from idlm.config.schema import show_default
from idlm.registry import Registry


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginHelp:
    """One plug-in: its name, the docstring of its Config, and its options with their defaults."""

    name: str
    text: str
    defaults: dict[str, Any]


def describe_decoders() -> str:
    """Help on all decoders and their options."""
    plugins = plugins_of("decoder", "idlm.infer.decoders", "DECODERS")
    return "\n".join(_described(each, f"decoder={each.name}", "decoder.") for each in plugins)


def describe_accelerators() -> str:
    """Help on all accelerators and their options."""
    plugins = plugins_of("accelerator", "idlm.infer.accelerators", "ACCELERATORS")
    return "\n".join(
        _described(each, f"accelerators=[{each.name}]", f"accelerators.{each.name}.") for each in plugins
    )


def _described(plugin: PluginHelp, choice: str, prefix: str) -> str:
    options = [f"{prefix}{name}={show_default(value)}" for name, value in plugin.defaults.items()]
    help_lines = plugin.text.splitlines() if options else []
    return "\n    ".join([choice, ", ".join(options) or "no options", *help_lines])


def plugins_of(kind: str, package: str, registry: str) -> list[PluginHelp]:
    """Every plug-in of a package, by name. They are registered in `registry`, a name in the package's module
    `base`.
    """
    if not importlib.metadata.entry_points(group=f"idlm.{kind}s"):
        try:
            return from_sources(package, registry)
        except (LookupError, ValueError):
            pass
    return from_registry(getattr(importlib.import_module(f"{package}.base"), registry))


def from_registry(registry: Registry[Any]) -> list[PluginHelp]:
    """Import every plug-in and read its Config."""
    return [_from_class(name, registry.get(name).Config) for name in registry.names()]


def _from_class(name: str, config: type) -> PluginHelp:
    defaults = {field.name: field.default for field in dataclasses.fields(config)}
    return PluginHelp(name=name, text=inspect.getdoc(config) or "", defaults=defaults)


def from_sources(package: str, registry: str) -> list[PluginHelp]:
    """Read every plug-in from the source of its file, without importing it.

    The usual form is `@REGISTRY.register("name")` on a class with `Config: ... = SomeConfig`, a dataclass
    with literal defaults in the same file or imported from another. ValueError or LookupError for any other
    form.
    """
    found = []
    root = importlib.import_module(package)
    for module in pkgutil.iter_modules(root.__path__):
        tree = _tree(f"{package}.{module.name}")
        for node in tree.body:
            name = _registered_name(node, registry)
            if name is not None:
                assert isinstance(node, ast.ClassDef)
                found.append(_from_node(name, _class(_config_name(node), tree)))
    return sorted(found, key=lambda each: each.name)


def _tree(module: str) -> ast.Module:
    spec = importlib.util.find_spec(module)
    source = None if spec is None or spec.loader is None else spec.loader.get_source(module)  # type: ignore[attr-defined]
    if source is None:
        raise LookupError(f"{module} has no source")
    return ast.parse(source)


def _registered_name(node: ast.stmt, registry: str) -> str | None:
    """The name in `@REGISTRY.register("name")` on a class; None for any other statement."""
    for decorator in node.decorator_list if isinstance(node, ast.ClassDef) else ():
        if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == f"{registry}.register":
            return str(ast.literal_eval(decorator.args[0]))
    return None


def _config_name(plugin: ast.ClassDef) -> str:
    for node in plugin.body:
        if (
            isinstance(node, ast.AnnAssign)
            and ast.unparse(node.target) == "Config"
            and node.value is not None
        ):
            return ast.unparse(node.value)
    raise LookupError(f"{plugin.name} sets no Config of its own")


def _class(name: str, tree: ast.Module) -> ast.ClassDef:
    """The class `name` in a file, or in the file that it is imported from."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return node
        if isinstance(node, ast.ImportFrom) and node.module and name in {one.name for one in node.names}:
            return _class(name, _tree(node.module))
    raise LookupError(f"no class {name}")


def _from_node(name: str, config: ast.ClassDef) -> PluginHelp:
    if config.bases:
        raise LookupError(f"{config.name} inherits options")
    defaults: dict[str, Any] = {}
    for node in config.body:
        if isinstance(node, ast.AnnAssign):
            defaults[ast.unparse(node.target)] = (
                dataclasses.MISSING if node.value is None else ast.literal_eval(node.value)
            )
    return PluginHelp(name=name, text=ast.get_docstring(config) or "", defaults=defaults)
