"""README.md and docs/ are true maps: links, anchors and paths exist, what is generated is fresh."""

from __future__ import annotations

import gzip
import json
import re
import tomllib
from pathlib import Path

import pytest

import docs.errors
from benchmarks.table import main as table_main
from docs.letters import legend, legends, meanings
from idlm import __version__
from idlm.errors import UserError, naming
from idlm.files.paths import POINTER, opened
from tests.repo.files import ROOT, listed

DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")] + DOCS
FENCE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
NAMES_OF_OTHERS = ("config.json", "idlm_config.json", "metrics.jsonl", ".json", "__init__.py")
"""Files of checkpoints and runs, a suffix, and a file that must not exist."""
LINK = re.compile(r"\]\(([^)\s]+)\)|(?:src|srcset|href)=\"([^\"]+)\"")
HEADING = re.compile(r"^#{1,6} (.+)$", re.MULTILINE)
PATH = re.compile(r"(?:\.{0,1}[\w-]+/)*[\w.-]*")
SUFFIXES = (".py", ".yaml", ".md", ".sh", ".toml", ".json", ".jsonl")
MADE_BY_COMMANDS = ("outputs/", ".venv/")


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def slug(heading: str) -> str:
    """The anchor that code hosts and the site agree on, for headings of words, commas and hyphens."""
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").strip().lower()
    return re.sub(r"[\s]+", "-", re.sub(r"[^\w\s-]", "", plain))


def anchors(path: Path) -> set[str]:
    text = FENCE.sub("", text_of(path))
    return {slug(found) for found in HEADING.findall(text)} | set(re.findall(r'id="([^"]+)"', text))


def links(path: Path) -> list[str]:
    found = LINK.findall(FENCE.sub("", text_of(path)))
    return [first or second for first, second in found if "://" not in (first or second)]


def broken(path: Path) -> list[str]:
    """Links of a page that lead nowhere."""
    bad = []
    for link in links(path):
        target, _, anchor = link.partition("#")
        file = path if not target else (path.parent / target).resolve()
        is_there = file.exists() and (not anchor or (file.suffix == ".md" and anchor in anchors(file)))
        bad += [] if is_there else [link]
    return bad


def test_links_are_found_and_broken_ones_reported(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    linked = '[x](#a-b-c) [y](#d) [z](other.md) [w](https://x.y)\n<img src="f.svg">'
    page.write_text(f"# A `b`, c\n{linked}\n```\n[no](n.md)\n```\n")
    assert links(page) == ["#a-b-c", "#d", "other.md", "f.svg"]
    assert broken(page) == ["#d", "other.md", "f.svg"]


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_every_link_and_anchor_resolves(path: Path) -> None:
    assert not broken(path)


def test_docs_link_only_to_docs() -> None:
    """The site holds nothing else; other files are named by their path."""
    outside = [(name_of(path), link) for path in DOCS for link in links(path) if link.startswith("..")]
    assert not outside


def test_every_page_is_in_the_sites_navigation() -> None:
    navigation = set(re.findall(r"([\w-]+\.md)", text_of(ROOT / "zensical.toml")))
    assert navigation == {path.name for path in DOCS}


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_every_path_that_is_named_exists(path: Path) -> None:
    named = [name for name in paths_named(FENCE.sub("", text_of(path))) if name not in NAMES_OF_OTHERS]
    assert not [name for name in named if not ((ROOT / name).exists() or (path.parent / name).exists())]


@pytest.mark.parametrize("path", [*PAGES, ROOT / "benchmarks" / "RESULTS.md"], ids=name_of)
def test_json_is_json(path: Path) -> None:
    for block in re.findall(r"^```json\n(.*?)^```", text_of(path), re.DOTALL | re.MULTILINE):
        json.loads(block)


def test_readme_is_short_and_speaks_of_every_page() -> None:
    readme = text_of(ROOT / "README.md")
    assert readme.count("\n") <= 120
    missing = [path.name for path in DOCS if path.name != "index.md" and f"docs/{path.name}" not in readme]
    assert not missing


@pytest.mark.sweep
def test_the_page_of_errors_is_fresh(capsys: pytest.CaptureFixture[str]) -> None:
    assert docs.errors.main(["--check"]) == 0, capsys.readouterr().out
    page = docs.errors.page()
    assert page.count('<a id="idlm-') > 100


def test_the_page_of_errors_has_the_words_of_functions_that_raise_given_codes(tmp_path: Path) -> None:
    """A folder, a pointer of Git LFS and half an archive, by `opened`; and `naming`."""
    (tmp_path / "pointer").write_bytes(POINTER + b"v1")
    (tmp_path / "half.gz").write_bytes(gzip.compress(bytes(range(256)) * 9)[:30])
    found = set[str]()
    for name in (".", "pointer", "half.gz"):
        with (
            pytest.raises(UserError) as caught,
            opened("IDLM-0430", tmp_path / name, key="k", fix="F") as file,
        ):
            file.read()
        given = caught.value.message, caught.value.fix
        found.update(
            one for one, fix in docs.errors.SHARED["opened"] if is_of(one, given[0]) and is_of(fix, given[1])
        )
    assert len(found) == 3
    with pytest.raises(UserError) as caught, naming("IDLM-0430", "W", fix="F"):
        raise KeyError
    assert is_of(docs.errors.SHARED["naming"][0][0], caught.value.message)


def is_of(form: str, text: str) -> bool:
    return bool(
        re.fullmatch(re.escape(form.format(what="W", fix="F")).replace(r"\.\.\.", ".+"), text, re.DOTALL)
    )


def test_figures_are_fresh() -> None:
    """Byte for byte where the matplotlib is the one that drew them; every one of them is used."""
    from matplotlib import __version__

    from docs.figures.__main__ import FOLDER, drawn

    pages = "".join(map(text_of, PAGES))
    fresh = drawn()
    assert set(fresh) == {path.name for path in FOLDER.glob("*.svg")}
    for name, text in fresh.items():
        assert f"figures/{name}" in pages, name
        kept = text_of(FOLDER / name)
        if f"Matplotlib v{__version__}," in kept:
            assert kept == text, f"{name} is stale: python -m docs.figures"


def test_every_figure_has_a_dark_and_a_light_side() -> None:
    for path in PAGES:
        for figure in re.findall(r"<picture>(.*?)</picture>", text_of(path), re.DOTALL):
            dark, light = (re.search(rf"([\w/-]+)-{side}\.svg", figure) for side in ("dark", "light"))
            assert dark and light and dark[1] == light[1] and 'alt="' in figure, name_of(path)


def test_legends_are_read() -> None:
    text = "What it does.\n\nShapes: B sequences, R rows (of a pass), K KV heads,\nJ = stride - 1 masks."
    assert [letter for letter, _ in legend(text)] == ["B", "R", "K", "J"]
    assert legend("A rule.\nB sequences, X = C listed slots + W own ones, N query heads.")[0] == (
        "B",
        "sequences",
    )
    assert legend("A sentence, and another one.") == []
    assert len(legends()) > 50


def test_a_shape_letter_has_one_meaning_per_file_and_is_reserved() -> None:
    twice = {
        name: read for name, read in legends().items() if len({letter for letter, _ in read}) < len(read)
    }
    assert not twice
    table = text_of(ROOT / "CONTRIBUTING.md").partition("## Shape letters")[2].partition("\n## ")[0]
    reserved = set(re.findall(r"\b([A-Za-z])\b(?=[, ].*\|.*\|)", table))
    assert set(meanings()) <= reserved


def test_the_layout_names_every_top_level_file() -> None:
    layout = text_of(ROOT / "CONTRIBUTING.md").partition("## Layout")[2]
    names = {name.split("/")[0] for name in listed(untracked=False)}
    assert not sorted(name for name in names if not re.search(rf"`{re.escape(name)}[/`]", layout))


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
    small = [ROOT / name for name in listed(untracked=False) if not name.startswith("recipes/assets/")]
    assert not [str(path) for path in small if path.is_file() and path.stat().st_size > 512_000]


def test_versions_agree() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == __version__
    assert project["scripts"]["idlm-train"] == "idlm.train.cli:main"
