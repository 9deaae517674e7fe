"""`idlm COMMAND`: every program `idlm-COMMAND` under one name, also those of other packages, and completion.

What a command is for, and its keys, come from `HELP` in its program's module. Nothing here imports torch."""

from __future__ import annotations

import contextlib
import importlib
import re
import shlex
import sys
import typing
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from idlm import __version__
from idlm.cli import command
from idlm.config.project import PREFIX, commands
from idlm.config.suggest import did_you_mean
from idlm.errors import UserError

COMPLETION = "completion"
SHELLS = ("bash", "zsh", "fish")


def main() -> int:
    return command.run(run_command)


def run_command(arguments: list[str]) -> int:
    """Run the command that the first argument names; returns its exit status. UserError IDLM-0107 for an
    unknown one, IDLM-0108 for the completion of an unknown shell."""
    name, *rest = arguments or ["--help"]
    if name in command.HELP_FLAGS or name == "help":
        print(f"idlm {__version__}" if name == "--version" else help_text())
        return 0
    known = commands()
    if name == COMPLETION:
        if len(rest) != 1 or rest[0] not in SHELLS:
            message = f"completion for {' '.join(rest) or 'no shell'}"
            raise UserError("IDLM-0108", message, fix=f"give one of: {', '.join(SHELLS)}")
        print(completion(rest[0], known))
        return 0
    if name not in known:
        names = [*known, COMPLETION]
        raise UserError(
            "IDLM-0107",
            f"unknown command {name!r}{did_you_mean(name.removeprefix(PREFIX), names)}",
            fix=f"give one of: {', '.join(names)}; idlm --help lists them",
        )
    sys.argv = [f"{PREFIX}{name}", *rest]
    return int(known[name].load()() or 0)


def help_text() -> str:
    """One line for each command."""
    from idlm.cli.help import columns

    rows = {name: summary(entry) for name, entry in commands().items()}
    rows[COMPLETION] = f"Prints the completion of commands and keys for {', '.join(SHELLS)}"
    usage = "usage: idlm COMMAND [key=value ...] | idlm COMMAND --help | idlm --version"
    end = '`idlm COMMAND` is the program `idlm-COMMAND`. Completion: eval "$(idlm completion bash)"'
    return f"{usage}\n\n{columns(rows)}\n\n{end}"


def summary(entry: metadata.EntryPoint) -> str:
    """What a command is for: the first sentence of its help, or of its module."""
    try:
        module = importlib.import_module(entry.module)
    # A broken plug-in, or library, must not hide the other commands.
    except Exception as error:
        return f"cannot be imported: {error}; see `idlm doctor`"
    help_ = getattr(module, "HELP", None)
    return help_.first_sentence if help_ else (module.__doc__ or "").partition("\n")[0].rstrip(".")


def words_of(entry: metadata.EntryPoint) -> Iterator[str]:
    """What may follow a command: flags, `key=`, or `key=value` for each value where they are few."""
    from idlm.cli.help import is_leaf
    from idlm.config.compose import RECIPE, recipes
    from idlm.config.schema import ITEM, walk

    with contextlib.suppress(Exception):
        importlib.import_module(entry.module)
    help_ = getattr(sys.modules.get(entry.module), "HELP", None)
    if help_ is None:
        return
    yield from (flag for text in help_.flags for flag in re.findall(r"(?<!\S)--?[a-z-]+", text))
    yield from sorted(command.HELP_FLAGS)
    if help_.has_recipes:
        yield from (f"{RECIPE}={name}" for name in recipes())
    keys = {key: annotation for key, annotation, *_ in walk(help_.schema) if is_leaf(annotation)}
    for key, annotation in {**keys, **dict.fromkeys(help_.plugin_keys(), None)}.items():
        if ITEM not in key:
            yield from (f"{key}={value}" for value in _choices(annotation) or [""])


def _choices(annotation: Any) -> list[str]:
    from idlm.config.schema import members

    found: list[str] = []
    for member in members(annotation):
        if member is bool:
            found += ["true", "false"]
        elif typing.get_origin(member) is Literal:
            found += map(str, typing.get_args(member))
        elif member is not type(None):
            return []
    return found


def completion(shell: str, known: dict[str, metadata.EntryPoint]) -> str:
    """The script by which a shell completes commands and keys."""
    words = {name: shlex.quote(" ".join(words_of(entry))) for name, entry in known.items()}
    names, shells = f"'{' '.join([*known, COMPLETION])}'", f"'{' '.join(SHELLS)}'"
    if shell == "fish":
        seen = "complete -c idlm -n '__fish_seen_subcommand_from"
        lines = [
            f"complete -c idlm -f -n __fish_use_subcommand -a {names}",
            f"{seen} {COMPLETION}' -a {shells}",
        ]
        lines += [f"{seen} {name}' -a {found}" for name, found in words.items()]
        return "\n".join([*lines, *(f"complete -c {PREFIX}{name} -a {words[name]}" for name in words)])
    cases = {"": names, **words, COMPLETION: shells}
    listed = "\n".join(f"    {PREFIX}{name}) found={found} ;;" for name, found in cases.items())
    template = Path(__file__).with_name(f"completion_{shell}.sh").read_text(encoding="utf-8").rstrip()
    programs = " ".join(["idlm", *(f"{PREFIX}{name}" for name in known)])
    return template.replace("CASES", listed).replace("NAMES", programs)


if __name__ == "__main__":
    sys.exit(main())
