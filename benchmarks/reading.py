"""Counts the files and lines of the product that a command runs through, which a newcomer has to read.

    python -m benchmarks.reading [command=generate|train] [files=true]

`generate` runs up to the last token of one prompt, `train` up to the end of the first optimizer step. A file
counts with all its lines once one of its functions runs; code at module level alone does not count.
`lines_run` are the lines of the functions that run. The traced process is a fresh one, so that no earlier
import or cache hides a call."""

from __future__ import annotations

import importlib
import inspect
import json
import subprocess
import sys
import tempfile
import threading
import tomllib
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from benchmarks.shared import chosen, defaults, parse_options, start

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("idlm", "infer", "train", "kernels")
DEFAULTS = defaults("command=generate files=false")
PROMPT = "Mia has 5 nuts. Mia breaks 2. Mia picks 1. Mia uses 4. Mia earns 6. How many nuts does Mia have?"
END_OF_STEP = ("trainer_callback.py", "on_step_end")


class Tracer:
    """Collects the functions that run in `FOLDERS`, until `ends_at` (file, function) returns."""

    def __init__(self, ends_at: tuple[str, str] | None) -> None:
        self.functions: dict[str, set[CodeType]] = {}
        self._ends_at, self._is_done = ends_at, False
        self._paths: dict[str, str | None] = {}

    def __enter__(self) -> Tracer:
        threading.setprofile(self._on_event)
        sys.setprofile(self._on_event)
        return self

    def __exit__(self, *error: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)

    def counts(self) -> dict[str, Any]:
        """All counts, and in `files` all lines and the lines run of each file."""
        files = {
            path: ((ROOT / path).read_text("utf-8").count("\n"), len(set().union(*map(_lines, run))))
            for path, run in sorted(self.functions.items())
        }
        return {
            "files_entered": len(files),
            "lines_entered": sum(all_lines for all_lines, _ in files.values()),
            "lines_run": sum(lines_run for _, lines_run in files.values()),
            "functions_entered": sum(map(len, self.functions.values())),
            "files": files,
        }

    def _on_event(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if self._is_done:
            return
        # Code of a function is optimized; that of a module or class is not, but for its comprehensions.
        is_function = code.co_flags & inspect.CO_OPTIMIZED and not code.co_qualname.startswith("<")
        if event == "call" and is_function:
            path = self._path(code.co_filename)
            if path is not None:
                self.functions.setdefault(path, set()).add(code)
        elif event == "return" and self._ends_at is not None:
            file, function = self._ends_at
            self._is_done = code.co_name == function and code.co_filename.endswith(file)

    def _path(self, name: str) -> str | None:
        """Path below the root of a file in the traced folders; None for any other file."""
        if name not in self._paths:
            path = Path(name).resolve()
            inside = path.is_relative_to(ROOT) and path.is_file()
            relative = path.relative_to(ROOT) if inside else Path("elsewhere")
            self._paths[name] = relative.as_posix() if relative.parts[0] in FOLDERS else None
        return self._paths[name]


def _lines(code: CodeType) -> range:
    """Numbers of the lines of a function with its decorators, or of a lambda or a generator expression."""
    if code.co_name.startswith("<"):
        return range(code.co_firstlineno, max(line or 0 for *_, line in code.co_lines()) + 1)
    source, first = inspect.getsourcelines(code)
    return range(first, first + len(source))


def arguments_of(name: str, folder: Path) -> list[str]:
    """Command line of the traced run, whose outputs go to `folder`."""
    if name == "train":
        stages = "train.stages=[{stride: 2, steps: 1}]"
        return ["recipe=tiny", "train.steps=null", stages, f"output_dir={folder}", "report.enabled=false"]
    model = ROOT / "recipes" / "assets" / "tiny_ar"
    decoder = ["decoder=isd", "decoder.stride=4", "mask_token_id=0", "sampling.temperature=0"]
    return [f"model={model}", *decoder, "-p", PROMPT]


def trace_into(name: str, folder: str, result: str) -> None:
    """Run `idlm-<name>` in this process and write the tracer's counts to the file `result`."""
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["scripts"]
    module, _, function = scripts[f"idlm-{name}"].partition(":")
    sys.argv = [f"idlm-{name}", *arguments_of(name, Path(folder))]
    with Tracer(ends_at=END_OF_STEP if name == "train" else None) as tracer:
        status = getattr(importlib.import_module(module), function)()
    assert status == 0, f"idlm-{name} ended with {status=}"
    Path(result).write_text(json.dumps(tracer.counts()), "utf-8")


def measure(arguments: list[str]) -> int:
    options = parse_options(arguments, DEFAULTS)
    [name] = chosen(options, "command", ("generate", "train"))
    child = "import sys; from benchmarks.reading import trace_into; trace_into(*sys.argv[1:])"
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "trace.json"
        run = [sys.executable, "-c", child, name, f"{folder}/out", str(result)]
        subprocess.run(run, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
        found = json.loads(result.read_text("utf-8"))
    files = found.pop("files")
    for path, (all_lines, lines_run) in files.items() if options["files"] == "true" else ():
        print(f"{all_lines:5} {lines_run:5} {path}")
    print(f"{name}: " + ", ".join(f"{number:,} {metric}" for metric, number in found.items()))
    return 0


if __name__ == "__main__":
    start(measure, __doc__)
