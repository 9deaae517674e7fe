"""Libraries that a command imports, and those that it leaves out though they are installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PLANNING = ", ".join(f"idlm.infer.mosaic.{name}" for name in ("template", "trunk", "planner", "chunking"))
LIST_AND_COMPLETION = """
from idlm.cli.main import main
for given in ([], ["--help"], ["completion", "bash"], ["trian"], ["train", "--help"]):
    sys.argv = ["idlm", *given]
    main()
"""
RULES = """
import gc
from importlib.util import find_spec
from idlm.cli import command
from idlm.cli.command import UNUSED, importing, leave_out_unused

command.owns_process = True
with importing():
    assert not gc.isenabled()
    leave_out_unused()
assert gc.isenabled()
import transformers.utils
assert find_spec("datasets"), "a dataset of the Hub needs it"
assert not any(getattr(transformers.utils, f"is_{name}_available")() for name in UNUSED)
"""
RUN = """
import sys
from idlm.train.cli import main
sys.argv = ["idlm-train", *arguments]
assert main() == 0
unused = ("datasets", "deepspeed", "matplotlib", "pandas", "peft", "pyarrow", "scipy", "wandb")
loaded = [name for name in unused if name in sys.modules]
assert not loaded, loaded
assert "transformers.trainer" in sys.modules
"""


def _run(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("code", "heavy"),
    [
        ("import idlm", {"numpy", "hydra", "datasets", "deepspeed", "wandb"}),
        ("import idlm.text.tokenizer, idlm.tasks.tokenizer as t; t.vocabulary()", {"tokenizers"}),
        (f"import {PLANNING}", {"numpy", "scipy"}),
        (LIST_AND_COMPLETION, {"numpy"}),
    ],
    ids=["package", "tokenizers", "planning", "list-and-completion"],
)
def test_light_parts_import_no_heavy_library(code: str, heavy: set[str]) -> None:
    loaded = f"{heavy | {'torch', 'transformers'}} & sys.modules.keys()"
    _run(f"import sys\n{code}\nloaded = {loaded}\nassert not loaded, loaded")


def test_only_the_process_of_a_command_imports_without_libraries_that_nothing_uses() -> None:
    _run(RULES)


@pytest.mark.sweep
def test_a_run_on_a_cpu_imports_no_library_that_it_does_not_use(tmp_path: Path) -> None:
    given = [
        "recipe=tiny",
        "train.steps=3",
        "train.device=cpu",
        "report.enabled=false",
        f"output_dir={tmp_path / 'out'}",
    ]
    _run(f"arguments = {given}\n{RUN}")
