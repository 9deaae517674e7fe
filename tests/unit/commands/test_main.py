"""`idlm COMMAND`: the commands, their list and their completion, for which nothing imports torch."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

from idlm import __version__
from idlm.cli.help import is_leaf
from idlm.cli.main import SHELLS, commands, completion, help_text, run_command, words_of
from idlm.config import project
from idlm.config.schema import ITEM, walk
from idlm.train.cli import HELP as TRAIN
from tests.errors import refused

ROOT = Path(__file__).resolve().parents[3]
NAMES = ("train", "generate", "serve", "chat", "eval", "bench", "import")
ENTRIES = ("[console_scripts]", "idlm-stars=stars:main", "idlm-broken=broken:main")
PLUGIN = '''"""Counts the stars. And more."""


def main():
    import sys

    print(sys.argv)
    return 7
'''


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A package that adds two commands by one entry each; one of them cannot be imported."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "stars.py").write_text(PLUGIN)
    (folder / "broken.py").write_text("import a_library_that_is_not_there\n")
    info = folder / "stars-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: stars\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("\n".join(ENTRIES))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        yield


def test_the_list_has_a_line_for_each_program_and_each_plug_in(plugin: None) -> None:
    lines = {line.split()[0]: line for line in help_text().splitlines() if line.startswith("  ")}
    assert {*NAMES, "stars", "broken", "completion"} <= set(lines)
    assert all(20 < len(line) < 110 for line in lines.values())
    assert lines["stars"].endswith("  Counts the stars. And more")
    assert "No module named 'a_library_that_is_not_there'" in lines["broken"]


def test_a_command_is_its_program(
    plugin: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["idlm"])
    assert run_command(["stars", "a=1"]) == 7
    assert capsys.readouterr().out == "['idlm-stars', 'a=1']\n"
    assert run_command(["import", "typo=1"]) == 2
    assert "unknown key 'typo'" in capsys.readouterr().err
    assert run_command(["--version"]) == 0 and capsys.readouterr().out == f"idlm {__version__}\n"
    for given in ([], ["help"], ["-h"]):
        assert run_command(given) == 0 and capsys.readouterr().out == f"{help_text()}\n"


@pytest.mark.parametrize(
    ("given", "meant"), [("trian", "train"), ("idlm-serve", "serve"), ("completions", "completion")]
)
def test_an_unknown_command_names_the_nearest(given: str, meant: str) -> None:
    refused(f"unknown command '{given}'; did you mean '{meant}'", run_command, [given])


def test_an_installed_wheel_reads_its_metadata(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "another"\nscripts = {idlm-x = "x:y"}\n')
    monkeypatch.setattr(project, "ROOT", tmp_path)
    installed = [entry.name for entry in metadata.entry_points(group="console_scripts")]
    assert [f"idlm-{name}" for name in commands()] == [name for name in installed if name[:5] == "idlm-"]
    assert "x" not in commands() and "train" in commands()


def test_completion_has_every_key_and_the_values_where_they_are_few() -> None:
    words = list(words_of(commands()["train"]))
    keys = {word.partition("=")[0] for word in words if "=" in word}
    schema = {key for key, kind, *_ in walk(TRAIN.schema) if is_leaf(kind) and ITEM not in key}
    assert keys == schema | {"recipe"}
    assert {"dry_run=true", "recipe=tiny", "train.learning_rate=", "--help"} <= set(words)
    words = list(words_of(commands()["generate"]))
    assert {"-p", "--prompt", "decoder.stride=", "graphs=auto", "accelerators.quest.k="} <= set(words)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("idlm tr", ["train"]),
        ("idlm train train.lea", ["train.learning_rate="]),
        ("idlm train dry_run=true resume=", []),
        ("/opt/bin/idlm-train dry_run=t", ["true"]),
        ("idlm generate decoder=isd -p", ["-p"]),
        ("idlm serve graphs=o", ["on", "off"]),
        ("idlm completion ", list(SHELLS)),
        ("idlm nothing ", []),
    ],
)
def test_bash_completes(line: str, expected: list[str]) -> None:
    """As bash calls the function: words are split at blanks and at equals signs."""
    words = line.replace("=", " = ").split() + [""] * line.endswith((" ", "="))
    array = " ".join(f"'{word}'" for word in words)
    call = f"COMP_WORDS=({array}); COMP_CWORD={len(words) - 1}; COMP_LINE='{line}'; COMP_POINT={len(line)}"
    script = f"{completion('bash', commands())}\n{call}; _idlm; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == expected and not done.stderr


@pytest.mark.parametrize(("shell", "check"), [("zsh", ["zsh", "-n"]), ("fish", ["fish", "--no-execute"])])
def test_other_shells_read_a_script_that_names_every_command(shell: str, check: list[str]) -> None:
    text = completion(shell, commands())
    assert all(f"idlm-{name}" in text and " train.learning_rate= " in text for name in NAMES)
    if shutil.which(shell):
        subprocess.run(check, input=text, text=True, check=True)
