"""Files of a clone without Git LFS are named, wherever a user gives them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from idlm.errors import UserError
from idlm.files.paths import opened
from idlm.files.tensors import stored_tensors
from idlm.text.tokenizer import load_tokenizer
from idlm.train.data.sources.jsonl import JsonlReader
from idlm.train.data.sources.parquet import ParquetReader

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a21\nsize 12345\n"
READERS: dict[str, Callable[[Path], Any]] = {
    "model.safetensors": lambda path: stored_tensors(path.parent),
    "tokenizer.json": lambda path: load_tokenizer(path.parent),
    "train.jsonl": lambda path: JsonlReader(str(path), ()),
    "train.parquet": lambda path: ParquetReader(str(path), ()),
    "gsm8k.jsonl": lambda path: opened("IDLM-0481", path, key="data", fix="give another").__enter__(),
}


@pytest.mark.parametrize("name", READERS)
def test_a_pointer_is_named_with_the_command_that_fetches_its_file(name: str, tmp_path: Path) -> None:
    path = tmp_path / "a clone" / name
    path.parent.mkdir()
    path.write_text(POINTER)
    with pytest.raises(UserError, match=f"{name} is a pointer of Git LFS") as caught:
        READERS[name](path)
    assert caught.value.fix == f"git -C '{path.parent}' lfs pull"
    path.write_text(POINTER.partition(" ")[0])
    if name in ("model.safetensors", "tokenizer.json"):
        with pytest.raises(UserError, match="cannot be"):
            READERS[name](path)
    else:
        READERS[name](path)
