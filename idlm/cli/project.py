"""What the package declares: its commands and what it needs. Imports nothing but the standard library and
`idlm.errors`, so that the doctor can run where other packages are broken."""

from __future__ import annotations

import tomllib
from importlib import metadata
from typing import Any

from idlm.errors import ROOT

PREFIX = "idlm-"
"""A program of any installed package that begins so is a command of `idlm`."""


def declared() -> dict[str, Any]:
    """`[project]` of a clone's pyproject.toml, which is newer than what an editable install stored; empty for
    a wheel."""
    file = ROOT / "pyproject.toml"
    if not file.is_file():
        return {}
    project: dict[str, Any] = tomllib.loads(file.read_text(encoding="utf-8")).get("project", {})
    return project if project.get("name") == "idlm" else {}


def commands() -> dict[str, metadata.EntryPoint]:
    """The commands by name, those of idlm first, in the order of `[project.scripts]`."""
    group = "console_scripts"
    scripts: dict[str, str] = declared().get("scripts", {})
    own = [metadata.EntryPoint(name=name, value=value, group=group) for name, value in scripts.items()]
    found: dict[str, metadata.EntryPoint] = {}
    for entry in [*own, *metadata.entry_points(group=group)]:
        if entry.name.startswith(PREFIX):
            found.setdefault(entry.name.removeprefix(PREFIX), entry)
    return found
