"""What the package declares: its commands, and what it and its extras need. Imports nothing but the standard
library and `packaging`, so that the doctor can run where other packages are broken."""

from __future__ import annotations

import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
"""The clone; of an installed wheel, the folder of all packages."""
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


def requirements() -> dict[str, list[Any]]:
    """What applies to this system, by extra; the extra "" is what idlm always needs."""
    from packaging.requirements import Requirement

    project, found = declared(), {"": list[Any]()}
    lines = [(line, "") for line in project.get("dependencies", ())]
    for extra, names in project.get("optional-dependencies", {}).items():
        lines += [(line, extra) for line in names]
    for line in () if project else metadata.requires("idlm") or ():
        lines.append((line, line.partition("extra == ")[2].strip("\"'")))
    for line, extra in lines:
        one = Requirement(line)
        if one.marker is None or one.marker.evaluate({"extra": extra}):
            one.marker = None
            found.setdefault(extra, []).append(one)

    def packages(one: Any) -> list[Any]:
        # An extra may name others: `idlm[structured]`.
        names = sorted(one.extras) if one.name == "idlm" else []
        return [leaf for name in names for each in found[name] for leaf in packages(each)] or [one]

    return {extra: [leaf for one in group for leaf in packages(one)] for extra, group in found.items()}


def install_command(extra: str) -> str:
    """The command that installs an extra: from the clone, or the packages of the extra for a wheel, since
    idlm is on no package index."""
    if declared():
        return f"pip install -e '{ROOT}[{extra}]'"
    return " ".join(["pip install", *(f"'{package}'" for package in requirements()[extra])])
