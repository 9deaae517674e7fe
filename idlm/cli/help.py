"""The output of `-h` and `--version`. Imports nothing slow: help must not wait for torch."""

from __future__ import annotations

import re
import textwrap
import tomllib
import typing
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from typing import Any, Self

from idlm import __version__
from idlm.config.compose import CONF_DIR, RECIPE, recipes
from idlm.config.schema import describe_type, is_schema, members, plain, walk

PARENTHESIS = re.compile(r"\s*\([^()]*\)")
_TEXTS = tomllib.loads(Path(__file__).with_name("help.toml").read_text(encoding="utf-8"))
SENTENCE_END = re.compile(r"(?<=[.;])\s")


@dataclass(frozen=True, kw_only=True)
class CommandHelp:
    """The help of a command, in its module as `HELP`: `usage` follows the name, `schema` has its keys, `keys`
    are the most used ones, which come first, `flags` are arguments other than `key=value` with their help;
    `has_recipes`: the bundled recipes are for it."""

    name: str
    schema: type
    usage: str
    summary: str
    examples: Sequence[str]
    keys: Sequence[str]
    flags: dict[str, str] = field(default_factory=dict)
    has_recipes: bool = False

    @classmethod
    def of(cls, name: str, schema: type, **more: Any) -> Self:
        """The help of a command of idlm, whose texts are in `help.toml`."""
        return cls(name=name, schema=schema, **_TEXTS[name], **more)

    @property
    def first_sentence(self) -> str:
        return SENTENCE_END.split(" ".join(self.summary.split()), maxsplit=1)[0].rstrip(".")

    def plugin_keys(self) -> list[str]:
        """The keys that no schema names."""
        return []

    def plugin_text(self) -> str:
        """What comes last, about such keys."""
        return ""

    def print(self, arguments: Sequence[str]) -> int:
        """Print the version if `arguments` name only that, else the help; returns the exit status 0."""
        is_version = "-h" not in arguments and "--help" not in arguments
        print(f"idlm {__version__}" if is_version else self.text())
        return 0

    def text(self) -> str:
        """The summary, recipes, examples, most used keys, flags and all keys."""
        flags = {**self.flags, "-h, --help": "print this text", "--version": "print the version"}
        sections = [f"usage: {self.name} {self.usage}", self.summary]
        if self.has_recipes:
            sections.append("Recipes:\n" + columns({name: recipe_summary(name) for name in recipes()}))
        more = "; recipe=NAME or recipe=FILE.yaml sets many at once" if self.has_recipes else ""
        sections += [
            "Examples:\n" + "\n".join(f"  {example}" for example in self.examples),
            "Most used keys:\n" + textwrap.indent(describe(self.schema, keys=self.keys), "  "),
            "Flags:\n" + columns(flags),
            f"All keys, given as key=value{more}:\n{describe(self.schema)}",
            self.plugin_text(),
        ]
        return "\n\n".join(filter(None, sections))


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
