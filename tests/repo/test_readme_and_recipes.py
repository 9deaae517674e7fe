"""Generated tables have true figures, every recipe composes, versions agree; what a path is in a text."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

from benchmarks.table import main as table_main
from idlm import __version__
from idlm.config.compose import compose, recipes
from idlm.train.config.schema import TrainConfig

ROOT = Path(__file__).resolve().parents[2]
PATH = re.compile(r"(?:\.{0,1}[\w-]+/)*[\w.-]*")
SUFFIXES = (".py", ".yaml", ".md", ".sh", ".toml", ".json", ".jsonl")
MADE_BY_COMMANDS = ("outputs/", ".venv/")


def tracked() -> list[str]:
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "-z"], capture_output=True, text=True, check=True
    )
    return [name for name in listed.stdout.split("\0") if name]


def paths_named(text: str) -> list[str]:
    """Inline code spans and link targets that look like paths of this repository."""
    spans = re.findall(r"`([^`\n]+)`", text) + re.findall(r"\]\(([^)#:\s]+)\)", text)
    plain = [span for span in spans if PATH.fullmatch(span) and not span.startswith(MADE_BY_COMMANDS)]
    return [span for span in plain if span.endswith(("/", *SUFFIXES)) or "/" in span]


def test_the_path_finder_finds_paths() -> None:
    text = "`idlm/x.py` and [a](docs/y.md) but not `key=value`, `outputs/tiny` or [b](https://x.org/z)"
    assert paths_named(text) == ["idlm/x.py", "docs/y.md"]


def test_every_figure_of_the_generated_tables_has_a_row() -> None:
    assert table_main(["--check"]) == 0


def test_no_large_file_is_tracked_outside_the_assets() -> None:
    small = [ROOT / name for name in tracked() if not name.startswith("recipes/assets/")]
    assert not [str(path) for path in small if path.is_file() and path.stat().st_size > 512_000]


@pytest.mark.parametrize("name", recipes())
def test_every_recipe_composes(name: str) -> None:
    assert compose("train", TrainConfig, [f"recipe={name}"]) != compose("train", TrainConfig, [])


def test_versions_agree() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == __version__
    assert project["scripts"]["idlm-train"] == "idlm.train.cli:main"
