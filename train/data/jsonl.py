"""A JSON-lines file as a data source: `prompt` and `response`, `messages`, or `text` on every line.

The whole file is checked and tokenised at start, so that a bad line stops the run before training, not after
hours.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from idlm.errors import UserError
from idlm.train.data.base import SOURCES, Encoder
from idlm.train.layout import Sample

if TYPE_CHECKING:
    from idlm.train.config import DataConfig

SHAPES = (
    '{"prompt": str, "response": str}, {"messages": [{"role": str, "content": str}, ...]} or {"text": str}'
)


class JsonlSource:
    """Tokenised samples in three flat arrays (5 bytes per token): one Python object per sample would cost far
    more.
    """

    num_samples: int | None

    def __init__(self, path: Path, encoder: Encoder) -> None:
        self.path = path
        token_ids: list[np.ndarray] = []
        supervised: list[np.ndarray] = []
        self.lines: list[int] = []
        for line_number, record in read_records(path):
            sample = encode_record(record, encoder, origin=f"{path}:{line_number}")
            token_ids.append(sample.token_ids.astype(np.int32))
            supervised.append(sample.supervised)
            self.lines.append(line_number)
        if not token_ids:
            raise UserError(
                "IDLM-0208", f"{path} has no samples", fix=f"give one JSON object per line: {SHAPES}"
            )
        self.offsets = np.cumsum([0, *map(len, token_ids)])
        self.token_ids = np.concatenate(token_ids)
        self.supervised = np.concatenate(supervised)
        self.num_samples = len(token_ids)

    def sample(self, index: int) -> Sample:
        span = slice(self.offsets[index], self.offsets[index + 1])
        return Sample(
            token_ids=self.token_ids[span].astype(np.int64),
            supervised=self.supervised[span],
            origin=f"sample {index} ({self.path}:{self.lines[index]})",
        )


@SOURCES.register("jsonl")
def jsonl_source(config: DataConfig, encoder: Encoder) -> JsonlSource:
    """Read `data.path`."""
    if config.path is None:
        raise UserError("IDLM-0209", "data.source=jsonl needs data.path", fix="set data.path=<file>.jsonl")
    return JsonlSource(Path(config.path), encoder)


def read_records(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(1-based line number, object) of every non-empty line; a line that is not a JSON object is an error."""
    if not path.is_file():
        raise UserError(
            "IDLM-0209", f"the data file {path} does not exist", fix="set data.path to a .jsonl file"
        )
    with path.open("rb") as lines:
        for line_number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except (json.JSONDecodeError, UnicodeDecodeError) as error:
                raise UserError(
                    "IDLM-0201",
                    f"{path}:{line_number} is not valid JSON: {error}",
                    fix="repair or delete that line; the file must hold one JSON object per line",
                ) from error
            if not isinstance(record, dict):
                raise _unknown_shape(f"{path}:{line_number}", f"a JSON {type(record).__name__}")
            yield line_number, record


def encode_record(record: dict[str, Any], encoder: Encoder, *, origin: str) -> Sample:
    """The sample of one JSON object, by the keys it has."""
    if {"prompt", "response"} <= record.keys():
        if not all(isinstance(record[key], str) for key in ("prompt", "response")):
            raise _unknown_shape(origin, "prompt and response that are not both strings")
        return encoder.pair(record["prompt"], record["response"], origin=origin)
    if "messages" in record:
        if not _are_messages(record["messages"]):
            raise _unknown_shape(origin, "messages that are not a list of {role, content} strings")
        return encoder.messages(record["messages"], origin=origin)
    if isinstance(record.get("text"), str):
        return encoder.text(record["text"], origin=origin)
    raise _unknown_shape(origin, f"the keys {sorted(record)}")


def _are_messages(messages: Any) -> bool:
    return isinstance(messages, list) and all(
        isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))
        for message in messages
    )


def _unknown_shape(origin: str, found: str) -> UserError:
    return UserError(
        "IDLM-0202", f"{origin} has {found}", fix=f"each line must have one of the shapes {SHAPES}"
    )
