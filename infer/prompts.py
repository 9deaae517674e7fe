"""Prompt files of `idlm-generate`: JSON lines with `prompt`, `prompt_ids` or `messages`, and per-line
settings.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from idlm.errors import UserError
from idlm.infer.config import SamplingConfig
from idlm.suggest import did_you_mean

SHAPES = ("prompt", "prompt_ids", "messages")
KEYS = (*SHAPES, "id", "sampling")


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLine:
    """One line: what to answer (text, ids or a conversation), under which id and settings."""

    request_id: str
    prompt: str | list[int] | list[dict[str, str]]
    sampling: dict[str, Any]


def read_prompts(path: str) -> Iterator[PromptLine]:
    """Yield the lines of a file; UserError with file and line number for anything that is not one. Blank
    lines pass.
    """
    source = Path(path)
    if not source.is_file():
        raise UserError("IDLM-0430", f"input={path!r} is not a file", fix="give a file of JSON lines")
    with source.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield _parse(f"{path}:{number}", number, line)


def _parse(place: str, number: int, line: str) -> PromptLine:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(
            "IDLM-0432", f"{place} is not valid JSON: {error}", fix="one JSON object per line"
        ) from error
    if not isinstance(record, dict) or sum(key in record for key in SHAPES) != 1:
        raise UserError("IDLM-0433", f"{place} needs exactly one of {SHAPES}", fix='write {"prompt": "..."}')
    unknown = [key for key in record if key not in KEYS]
    if unknown:
        raise UserError(
            "IDLM-0434",
            f"{place}: unknown key {unknown[0]!r}{did_you_mean(unknown[0], KEYS)}",
            fix=f"use {KEYS}",
        )
    sampling = record.get("sampling", {})
    known = tuple(SamplingConfig.__dataclass_fields__)
    bad = [key for key in sampling if key not in known] if isinstance(sampling, dict) else [str(sampling)]
    if bad:
        raise UserError(
            "IDLM-0435",
            f"{place}: unknown sampling {bad[0]!r}{did_you_mean(bad[0], known)}",
            fix=f"use {known}",
        )
    prompt = next(record[key] for key in SHAPES if key in record)
    wants = str if "prompt" in record else list
    if not isinstance(prompt, wants):
        raise UserError(
            "IDLM-0436", f"{place}: the prompt is a {type(prompt).__name__}", fix=f"give a {wants.__name__}"
        )
    return PromptLine(request_id=str(record.get("id", number)), prompt=prompt, sampling=sampling)
