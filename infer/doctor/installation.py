"""Packages: versions against what idlm declares, copies that hide each other, and imports. This module needs
the standard library and `packaging` alone, so that it runs where packages are broken."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlparse

from idlm.config.project import ROOT, declared, install_command, requirements
from idlm.config.suggest import did_you_mean
from idlm.errors import UserError
from idlm.fingerprint import version_of

OK, NOTE, PROBLEM = "ok", "note", "problem"
NOT_FOR_USERS = ("dev", "docs", "sweep")
IMPORTED = ("torch", "transformers", "tokenizers", "safetensors", "numpy")


class Finding(NamedTuple):
    """One line of the report. A `PROBLEM` keeps a command from running here, or makes its answers wrong; a
    `NOTE` is what some commands lack. `fix` is an instruction, empty where nothing needs one."""

    status: str
    name: str
    text: str
    fix: str = ""


def findings(extras: Iterable[str]) -> Iterator[Finding]:
    """`extras`: those whose packages must all be there. UserError IDLM-0109 for an unknown one."""
    groups = {name: group for name, group in requirements().items() if name not in NOT_FOR_USERS}
    wanted = set(extras)
    if unknown := sorted(wanted - groups.keys()):
        message = f"unknown extra {unknown[0]!r}{did_you_mean(unknown[0], groups)}"
        raise UserError("IDLM-0109", message, fix=f"give some of: {', '.join(filter(None, groups))}")
    shown: set[str] = set()
    for extra, group in groups.items():
        versions = {one.name: version_of(one.name) for one in group}
        lacking = [one for one in group if versions[one.name] is None]
        for one in group:
            if (version := versions[one.name]) is not None and one.name not in shown:
                shown.add(one.name)
                is_allowed = one.specifier.contains(version, prereleases=True)
                fix = "" if is_allowed else f"pip install '{one}'"
                text = f"{version}, allowed {one.specifier}"
                yield Finding(OK if is_allowed else PROBLEM, one.name, text, fix)
        if lacking:
            # The few packages of a small extra may be there for another package.
            is_broken = len(group) > 3 and 2 * len(lacking) < len(group)
            status = PROBLEM if not extra or extra in wanted or is_broken else NOTE
            named = " ".join(f"'{one}'" for one in lacking)
            fix = install_command(extra) if extra else f"pip install {named}"
            text = f"lacks {', '.join(one.name for one in lacking)}"
            yield Finding(status, f"extra {extra}" if extra else "idlm", text, fix)
    yield from _copies(sorted({"idlm", *(one.name for group in groups.values() for one in group)}))
    yield from _imports()


def _copies(names: Iterable[str]) -> Iterator[Finding]:
    """Several versions of one package on the import path, and an `idlm` that is not the installed one."""
    for name in names:
        found = {one.version: one.locate_file("") for one in metadata.distributions(name=name)}
        if len(found) > 1:
            text = "; ".join(f"{version} in {folder}" for version, folder in found.items())
            fix = f"unset PYTHONPATH; pip uninstall {name} until none is left; then install one"
            # Of other packages the first one counts, whose version is examined.
            yield Finding(PROBLEM if name == "idlm" else NOTE, name, f"several versions: {text}", fix)
    installed = next(map(_origin, metadata.distributions(name="idlm")), None)
    if installed is not None and installed != ROOT:
        fix = "unset PYTHONPATH" + f", or pip install -e '{ROOT}'" * bool(declared())
        yield Finding(PROBLEM, "idlm", f"imported from {ROOT}, but installed from {installed}", fix)
    else:
        yield Finding(OK, "idlm", f"imported from {ROOT}" + ", not installed" * (installed is None))


def _origin(distribution: metadata.Distribution) -> Path:
    """The folder that an installed package is imported from."""
    url = json.loads(distribution.read_text("direct_url.json") or "{}")
    is_editable = url.get("dir_info", {}).get("editable")
    return Path(
        unquote(urlparse(url["url"]).path) if is_editable else str(distribution.locate_file(""))
    ).resolve()


def _imports() -> Iterator[Finding]:
    for name in IMPORTED:
        if (installed := version_of(name)) is None:
            continue
        try:
            module = importlib.import_module(name)
        # A broken library raises anything.
        except Exception as error:
            fix = f"pip install --force-reinstall '{name}=={installed}'"
            yield Finding(PROBLEM, name, f"cannot be imported: {error}", fix)
            continue
        if module.__version__.partition("+")[0] != installed.partition("+")[0]:
            text = f"{module.__version__} comes from {module.__file__}, but {installed} is installed"
            yield Finding(PROBLEM, name, text, "unset PYTHONPATH, and start outside of that folder")
    # Hydra reads `key=value` by a grammar that one version of antlr's runtime understands.
    try:
        from idlm.config.compose import parse_value

        parse_value("key", "[1,2]")
    except Exception as error:
        lines = metadata.requires("hydra-core") if version_of("hydra-core") else ()
        wanted = next((line for line in lines or () if line.startswith("antlr4")), "hydra-core")
        given = version_of("antlr4-python3-runtime")
        text = f"options cannot be read with antlr4-python3-runtime {given}: {str(error).strip()[:200]}"
        yield Finding(PROBLEM, "hydra", text, f"pip install '{wanted}'")
