"""One standard term per idea, and no trace of how the project was made: text says what is, not what was.

Private words stay out of code, options, errors and documentation. "Law" is mathematics: the sampling law, and
the folders and commands that test it.
"""

from __future__ import annotations

import io
import re
import subprocess
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PRIVATE = re.compile(
    r"(?<!<)(?<!</)\b(pictures?|in flight|lawless|grains?|seated|seats|sits down|sat down|whoever|nobody"
    r"|hires?|hired|obeys?|thinned)\b(?!>)",
    re.IGNORECASE,
)
PERSONS = re.compile(
    r"\b((?:finds?|found) no room|(?:rows|passes|positions|sequences) (?:ask|go on)\b"
    r"|(?:pass|row|position) asks|(?:is|are|was|were) asked for|rows behind the last|places? of a block)\b",
    re.IGNORECASE,
)
"""Things are not persons: rows do not fit, a position needs a row."""
NAMES = re.compile(
    r"_?(?:places?|dice|told|said|says|rooms?|least|most|recut|goes_on)(?:_[A-Z0-9]+)?|_?asked(?:_[A-Z0-9]+|_for)"
    r"|(?:least|most)_(?!common)\w+|(?!test_)\w+_(?:(?<!in_)places?|recut)(?:_[A-Z0-9]+)?|(?:Mend|Recut)\w+"
)
"""Names in code: an index or a position, a random generator, a minimum, a maximum, a limit."""
CONSTANTS = re.compile(r"\b((?:LEAST|MOST)_[A-Z_]+|[A-Z]+_(?:TO|FOR)_A_[A-Z]+)\b")
TRACES = re.compile(
    r"\b(issues? \d+|(?:this|the) issue(?:'s)?\b|shared facts|(?:a|the|next|last|this) lease\b|leases/"
    r"|reviews? found|founders?|colleagues?|renamed before)|_of_the_issue\b",
    re.IGNORECASE,
)
MEASURED = re.compile(r"commit [0-9a-f]{12}(?:\+|, [0-9a-f]{12})")
"""A caption that names a tree with changes, or several commits."""
LEFT_OUT = ("benchmarks/results/", "recipes/assets/", "tests/repo/test_words.py")


def texts() -> list[Path]:
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split("\0")
    kinds = (".py", ".md", ".yaml", ".yml", ".toml", ".sh", ".gitignore", "Makefile")
    names = [name for name in listed if name.endswith(kinds) and not name.startswith(LEFT_OUT)]
    return [ROOT / name for name in names if (ROOT / name).is_file()]


def names_in(name: str, text: str) -> list[str]:
    """Private names in Python code, which words of a text may be."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline) if name.endswith(".py") else ()
    return [
        f"{name}:{token.start[0]}: {token.string}"
        for token in tokens
        if token.type == tokenize.NAME and NAMES.fullmatch(token.string)
    ]


def words_in(name: str, text: str) -> list[str]:
    """Lines of a file with words that do not belong there."""
    patterns = (PRIVATE, PERSONS, TRACES, MEASURED, *([CONSTANTS] if name.endswith(".py") else []))
    return names_in(name, text) + [
        f"{name}:{number}: {word[0]}"
        for number, line in enumerate(text.splitlines(), start=1)
        for pattern in patterns
        for word in pattern.finditer(line)
    ]


def test_no_private_words_and_no_traces() -> None:
    found, paths = [], texts()
    assert len(paths) > 300, "git lists the files to check"
    for path in paths:
        found += words_in(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8"))
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "line",
    [
        "Whoever is seated",
        "MOST_ROWS = 1",
        "place = num_places_B",
        "rng = dice",
        "x = least_rows",
        "x = asked_B",
        "# A row that finds no room waits",
        "# logits that were asked for",
        "# W places of a block",
        "sizes are those of issue 15",
        "the issue's table",
        "def test_sizes_are_those_of_the_issue",
        "the shared facts (section 8)",
        "The lease ended while its arms were decoded",
        "Smaller things that reviews found",
        "measured at commit c4d7865b3565, fe88c7e11259",
        "measured at commit dc999cb432e0+, today",
    ],
)
def test_the_check_finds_words(line: str) -> None:
    assert words_in("x.py", f"{line}\n")
    assert not words_in("x.py", "mode = 'sampling law'  # at most, at commit c4d7865b3565\n")
