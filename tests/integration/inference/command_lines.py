"""What the tests of the command lines share: the bundled base, short runs, a reference engine."""

from __future__ import annotations

import functools
import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from idlm.contracts import Completion, SamplingParams
from idlm.infer.engine import Engine

TINY = Path(__file__).resolve().parents[3] / "recipes" / "assets" / "tiny_ar"
SPARE_ROW = 170
AR = ["decoder=ar"]
ISD = ["decoder=isd", "decoder.stride=4", f"mask_token_id={SPARE_ROW}"]
SHORT = 6
MODEL = [f"model={TINY}", "device=cpu", "max_num_seqs=2", "max_length=160", "dtype=float32"]
GREEDY = ["sampling.temperature=0", f"sampling.max_tokens={SHORT}", "sampling.ignore_eos=true", "stats=false"]
BASE = [*MODEL, *AR, *GREEDY]
PROMPTS = [f"Lea has {number} shells. Lea finds {number + 1}." for number in range(2, 9)]


@functools.cache
def reference() -> Engine:
    """An engine that no test interrupts."""
    return Engine.from_pretrained(TINY, "ar", device="cpu", dtype="float32", max_num_seqs=2, max_length=160)


def answer(prompt: Any, **settings: Any) -> Completion:
    """The greedy answer that every path must give."""
    params = SamplingParams(**{"temperature": 0, "max_tokens": SHORT, "ignore_eos": True, **settings})
    [done] = reference().generate([prompt], params)
    return done


def write_lines(path: Path, lines: list[Any]) -> Path:
    """Write JSON lines; a string is written unchanged."""
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(texts) + "\n", encoding="utf-8")
    return path


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Records of an output file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def interrupt_after(monkeypatch: pytest.MonkeyPatch, num_steps: int) -> None:
    """Make the tested engine raise after `num_steps` passes; the reference engine continues."""
    run_step, count = Engine.run_step, 0

    def passing(engine: Engine) -> Any:
        nonlocal count
        count += engine is not reference()
        if count > num_steps and engine is not reference():
            raise KeyboardInterrupt
        return run_step(engine)

    monkeypatch.setattr(Engine, "run_step", passing)


def give_stdin(monkeypatch: pytest.MonkeyPatch, text: str, *, is_terminal: bool = False) -> None:
    """Replace standard input."""
    stdin = io.StringIO(text)
    monkeypatch.setattr(stdin, "isatty", lambda: is_terminal)
    monkeypatch.setattr(sys, "stdin", stdin)
