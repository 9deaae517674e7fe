"""The output of `-h` and `--version`. Imports nothing slow: help must not wait for torch."""

from __future__ import annotations

import re
import textwrap
import typing
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, field
from typing import Any

from idlm import __version__
from idlm.config.compose import CONF_DIR, RECIPE, recipes
from idlm.config.schema import describe_type, is_schema, members, plain, walk

PARENTHESIS = re.compile(r"\s*\([^()]*\)")
SENTENCE_END = re.compile(r"(?<=[.;])\s")


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandHelp:
    """The help of a command, in its module as `HELP`: `usage` follows the name, `schema` has its keys, `keys`
    are the most used ones, which come first, `plugin_keys` those that no schema names, `flags` are arguments
    other than `key=value` with their help; `has_recipes`: the bundled recipes are for it."""

    name: str
    schema: type
    usage: str
    summary: str
    examples: tuple[str, ...]
    keys: tuple[str, ...]
    flags: dict[str, str] = field(default_factory=dict)
    has_recipes: bool = False
    plugin_keys: Callable[[], Sequence[str]] = tuple

    @property
    def first_sentence(self) -> str:
        return SENTENCE_END.split(" ".join(self.summary.split()), maxsplit=1)[0].rstrip(".")


def print_help(command: CommandHelp, arguments: Sequence[str], *, plugins: str = "") -> int:
    """Print the version if `arguments` name only that, else the help; returns the exit status 0."""
    is_version = "-h" not in arguments and "--help" not in arguments
    print(f"idlm {__version__}" if is_version else help_text(command, plugins=plugins))
    return 0


def help_text(command: CommandHelp, *, plugins: str = "") -> str:
    """Return the summary, recipes, examples, most used keys, flags and all keys of a command; `plugins`,
    about options that no schema names, comes last."""
    flags = {**command.flags, "-h, --help": "print this text", "--version": "print the version"}
    sections = [f"usage: {command.name} {command.usage}", command.summary]
    if command.has_recipes:
        sections.append("Recipes:\n" + columns({name: recipe_summary(name) for name in recipes()}))
    more = "; recipe=NAME or recipe=FILE.yaml sets many at once" if command.has_recipes else ""
    sections += [
        "Examples:\n" + "\n".join(f"  {example}" for example in command.examples),
        "Most used keys:\n" + textwrap.indent(describe(command.schema, keys=command.keys), "  "),
        "Flags:\n" + columns(flags),
        f"All keys, given as key=value{more}:\n{describe(command.schema)}",
    ]
    return "\n\n".join([*sections, plugins] if plugins else sections)


def describe(schema: type, *, keys: Sequence[str] = ()) -> str:
    """Describe every key of `schema`, or only `keys`: type, default and help text; sections only if they have
    help."""
    lines = {}
    for key, annotation, item, default in walk(schema):
        has_value, text = is_leaf(annotation), item.metadata.get("help", "")
        if has_value or text:
            shown = f" = {show_default(default)}" if has_value else ""
            lines[key] = f"{key}{shown}\n    {text} [{describe_type(annotation)}]"
    return "\n".join(lines[key] for key in keys or lines)


def is_leaf(annotation: Any) -> bool:
    """Return True for keys of values, False for sections and lists of sections."""
    return not any(
        is_schema(item) for one in members(annotation) for item in (one, *typing.get_args(one)[:1])
    )


def show_default(default: Any) -> str:
    """Return a default as a user would type it."""
    if default is MISSING:
        return "(required)"
    value = plain(default)
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return f"[{','.join(map(show_default, value))}]" if isinstance(value, list) else str(value)


def recipe_summary(name: str) -> str:
    """Return the first sentence of the comment at the start of a recipe."""
    lines = (CONF_DIR / RECIPE / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
    comment: list[str] = []
    for line in lines:
        if not line.startswith("# "):
            break
        comment.append(line.removeprefix("# ").strip())
    text = PARENTHESIS.sub("", " ".join(comment))
    return SENTENCE_END.split(text, maxsplit=1)[0].rstrip(".;")


def columns(rows: dict[str, str]) -> str:
    width = max(map(len, rows))
    return "\n".join(f"  {name:<{width}}  {text}" for name, text in rows.items())
