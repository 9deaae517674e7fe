"""Prompts of `idlm-bench` that are text: a built-in list, the problems of a generated task, or a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from idlm.contracts import SamplingParams
from idlm.errors import UserError
from idlm.files.paths import DAMAGE, translate_path_errors, unpacked
from idlm.infer.cli.prompts import PromptLine, read_prompts, text_prompts
from idlm.tasks import TASKS

NUM_PROBLEMS = 64
LIST = Path(__file__).with_suffix(".txt")
"""Questions and instructions of the kinds that people send, one a line."""


def load_prompts(source: str) -> list[Any]:
    """Each prompt is a text (one turn of a user), token ids, or messages. `source`: `text`, the name of a
    task, or a file of JSON lines (as for `idlm-generate`) or with a text in each line. Raises UserError
    IDLM-0706 for anything else, and the UserErrors of `read_prompts`."""
    if source in TASKS.names():
        task = TASKS.get(source)(level="tiny", seed=1)
        return [task.sample(number, "test").prompt for number in range(NUM_PROBLEMS)]
    path = LIST if source == "text" else Path(source)
    fix = f"give random, text, a task ({', '.join(sorted(TASKS.names()))}), or a file with prompts alone"
    lines = _read(path, fix) if path.is_file() else []
    own = [line.place for line in lines if line.params != SamplingParams()]
    if own or not lines:
        what = f"{own[0]} has sampling settings" if own else f"prompts={source} is no file with prompts"
        raise UserError("IDLM-0706", what, fix=fix)
    return [line.prompt for line in lines]


def _read(path: Path, fix: str) -> list[PromptLine]:
    try:
        with translate_path_errors("IDLM-0706", path, fix=fix), path.open("rb") as file:
            texts = [text for line in unpacked(file, path) if (text := line.decode("utf-8-sig").strip())]
    except (*DAMAGE, UnicodeDecodeError) as error:
        raise UserError("IDLM-0706", f"prompts={path} cannot be read: {error}", fix=fix) from error
    if texts and texts[0].startswith("{"):
        return list(read_prompts(str(path), SamplingParams(), drop_last_turn=True, carry_keys=True))
    return list(text_prompts(texts, SamplingParams(), place=f"prompts={path}, prompt"))
