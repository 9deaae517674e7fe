"""A file of prompts is looked through without remembering its lines."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from idlm.errors import UserError
from idlm.infer.config import SamplingConfig
from idlm.infer.prompts import check_prompts


def _written(path: Path, ids: list[Any]) -> str:
    lines = [{"prompt": "x"} if name is None else {"prompt": "x", "id": name} for name in ids]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return str(path)


@pytest.mark.parametrize("ids", [[None] * 3_000, list(range(3_000, 0, -1))])
def test_no_line_is_remembered(tmp_path: Path, ids: list[Any]) -> None:
    source = _written(tmp_path / "in", ids)
    check_prompts(source, SamplingConfig())
    tracemalloc.start()
    try:
        check_prompts(source, SamplingConfig())
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most / len(ids) < 60, f"{most / len(ids)} bytes each"


@pytest.mark.parametrize(
    "ids",
    [[None, "02"], [None, None, "٢"], [None, "1" * 5_000], [None, "0"], [None, "-1"], [None, 3]],
)
def test_ids_that_are_no_numbers_of_lines_without_one(tmp_path: Path, ids: list[Any]) -> None:
    check_prompts(_written(tmp_path / "in", ids), SamplingConfig())


@pytest.mark.parametrize(("ids", "place"), [([2, None], 1), ([None, "1"], 2), (["a", None, None, 3], 4)])
def test_ids_that_are(tmp_path: Path, ids: list[Any], place: int) -> None:
    source = _written(tmp_path / "in", ids)
    with pytest.raises(UserError, match=f"IDLM-0465: {source}:{place}: "):
        check_prompts(source, SamplingConfig())
