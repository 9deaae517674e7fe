"""The tracer of benchmarks.reading on a toy package: which files, lines and functions count."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from benchmarks import reading
from idlm.errors import UserError

ENTERED = "class Base:\n    size = 1\n\n    def get(self):\n        return 1\n\n\ndef unused():\n    pass\n"
IMPORTED = (
    "import toy_product.entered\n\nVALUE = toy_product.entered.Base.size\n\n\ndef unused():\n    pass\n"
)


def test_files_count_once_a_function_of_theirs_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder, name, text in (
        ("toy_product", "entered.py", ENTERED),
        ("toy_product", "imported.py", IMPORTED),
        ("toy_other", "outside.py", "def call():\n    return 2\n"),
    ):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    with reading.Tracer(tmp_path.resolve(), ("toy_product",)) as tracer:
        entered = importlib.import_module("toy_product.imported").toy_product.entered
        assert entered.Base().get() + importlib.import_module("toy_other.outside").call() == 3
        entered.Base().get()
    counts = tracer.counts()
    assert counts["files"] == {"toy_product/entered.py": ENTERED.count("\n")}
    assert (counts["files_entered"], counts["functions_entered"]) == (1, 1)
    assert counts["lines_entered"] == ENTERED.count("\n")


def test_nothing_counts_after_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "toy_steps").mkdir()
    text = "def on_end():\n    pass\n\n\ndef late():\n    pass\n"
    (tmp_path / "toy_steps" / "loop.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    loop = importlib.import_module("toy_steps.loop")
    with reading.Tracer(tmp_path.resolve(), ("toy_steps",), ends_at=("loop.py", "on_end")) as tracer:
        loop.on_end()
        loop.late()
    assert tracer.functions == {"toy_steps/loop.py": {"on_end:1"}}


def test_an_unknown_command_is_refused() -> None:
    with pytest.raises(UserError, match="IDLM-0107"):
        reading.measure(["command=serve"])
