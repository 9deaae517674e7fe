"""`recipes/generate_ray.py`: answers do not depend on parts, engines or restarts, with Ray and without it."""

from __future__ import annotations

import gzip
import json
import socket
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from idlm.conf.recipe import generate_ray
from idlm.conf.recipe.generate_ray import (
    PartAnswerer,
    RayConfig,
    check_cluster,
    cut,
    generate,
    read_part,
    seed_of,
)
from idlm.infer.cli.config import EngineArguments, read_arguments
from idlm.infer.cli.generate import generate as generate_one
from idlm.infer.engine import Engine
from tests.errors import refused
from tests.integration.inference.command_lines import PROMPTS, TINY, read_lines, write_lines

# In float64 the rounding of a batch decides no sampled token.
OPTIONS = [f"model={TINY}", "device=cpu", "dtype=float64", "decoder=ar", "max_num_seqs=2", "max_length=160"]
SAMPLED = [*OPTIONS, "sampling.max_tokens=6", "sampling.ignore_eos=true"]
ROWS: list[dict[str, Any]] = [
    {"id": f"row {location}", "prompt": prompt} for location, prompt in enumerate(PROMPTS)
]
ROWS[2]["sampling"] = {"seed": 5, "max_tokens": 3}
ROWS[4] = {"id": "ids", "prompt_ids": [5, 6, 7]}
SAME = ("request_id", "prompt", "token_ids", "text", "finish_reason", "seed", "run_config")


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Two row groups of four and three rows."""
    schema = pyarrow.unify_schemas([pyarrow.Table.from_pylist([row]).schema for row in rows])
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows, schema=schema), path, row_group_size=4)
    return path


def write_gzip(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_bytes(gzip.compress("".join(f"{json.dumps(row)}\n" for row in rows).encode()))
    return path


WRITERS = {"in.jsonl": write_lines, "in.jsonl.gz": write_gzip, "in.parquet": write_parquet}


def records(folder: Path) -> list[dict[str, Any]]:
    """The records of all parts in order, as far as they may not differ."""
    found = [record for path in sorted(folder.glob("part-*.jsonl")) for record in read_lines(path)]
    return [{name: record[name] for name in SAME} for record in found]


class Local:
    """Ray's place: it answers parts one after another, with one engine for all tests."""

    engine: Engine | None = None

    def __init__(self, *, keeps_engine: bool = True) -> None:
        self.keeps_engine = keeps_engine
        self.parts: list[str] = []

    def __call__(self, parts: Any, config: RayConfig, arguments: EngineArguments, common: Any) -> Any:
        if Local.engine is None and self.keeps_engine:
            Local.engine = arguments.load(is_shown=False)
        answerer = PartAnswerer(config, replace(arguments), common)
        self.parts += [part.name for part in parts]
        batches = [answerer({name: [value] for name, value in asdict(part).items()}) for part in parts]
        return [{name: value[0] for name, value in batch.items()} for batch in batches]


@pytest.fixture
def local(monkeypatch: pytest.MonkeyPatch) -> Iterator[Local]:
    found = Local()
    monkeypatch.setattr(generate_ray, "answer_with_ray", found)
    load = EngineArguments.load
    monkeypatch.setattr(
        EngineArguments, "load", lambda self, **options: Local.engine or load(self, **options)
    )
    yield found
    assert Local.engine is None or not Local.engine.has_work


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_lines(tmp_path_factory.mktemp("ray") / "in.jsonl", ROWS)


@pytest.fixture
def expected(source: Path, tmp_path: Path, local: Local) -> list[dict[str, Any]]:
    """Each row alone, by idlm-generate, with the seed of the row."""
    rows = [
        {**row, "sampling": {"seed": seed_of(None, row["id"]), **row.get("sampling", {})}} for row in ROWS
    ]
    lines = write_lines(tmp_path / "alone.jsonl", rows)
    assert generate_one([*SAMPLED, f"input={lines}", f"output={tmp_path / 'alone'}", "stats=false"]) == 0
    return [{name: record[name] for name in SAME} for record in read_lines(tmp_path / "alone")]


@pytest.mark.sweep_but("100-in.jsonl")
@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("size", [3, 100])
def test_records_are_those_of_idlm_generate(
    name: str, size: int, tmp_path: Path, local: Local, expected: list[dict[str, Any]]
) -> None:
    path, folder = WRITERS[name](tmp_path / name, ROWS), tmp_path / "out"
    assert generate([*SAMPLED, f"input={path}", f"output={folder}", f"rows_per_part={size}"]) == 0
    assert records(folder) == expected
    assert len(local.parts) == (3 if size == 3 else 1)
    assert len({record["seed"] for record in expected}) == len(ROWS)


def test_a_restarted_job_answers_what_is_missing(
    source: Path, tmp_path: Path, local: Local, expected: list[dict[str, Any]]
) -> None:
    folder = tmp_path / "out"
    job = [*SAMPLED, f"input={source}", f"output={folder}", "rows_per_part=2"]
    assert generate(job) == 0
    (folder / "part-00001.jsonl").unlink()
    third = folder / "part-00002.jsonl"
    kept = third.read_text().splitlines(keepends=True)
    (folder / "part-00002.jsonl.partial").write_text(kept[0] + kept[1][:30])
    third.unlink()
    local.parts.clear()
    assert generate(job) == 0
    assert local.parts == ["part-00001.jsonl", "part-00002.jsonl"]
    assert records(folder) == expected and third.read_text().startswith(kept[0])
    local.parts.clear()
    assert generate(job) == 0
    assert not local.parts, "nothing is loaded for a complete job"
    refused("IDLM-0463", generate, [*job, "sampling.top_k=3"])
    refused("IDLM-0463", generate, [*job, "sampling.seed=3"])
    refused("IDLM-04(44|46)", generate, [*job[:-1], "rows_per_part=4"])


def test_a_row_that_the_engine_refuses_does_not_stop_the_others(
    tmp_path: Path, local: Local, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [*ROWS[:2], {"id": "long", "prompt_ids": [5] * 200}, *ROWS[3:]]
    path, folder = write_lines(tmp_path / "in.jsonl", rows), tmp_path / "out"
    assert generate([*SAMPLED, f"input={path}", f"output={folder}", "rows_per_part=2"]) == 1
    assert f"{path}:3" in capsys.readouterr().err
    assert [record["request_id"] for record in records(folder)] == ["row 0", "row 1", "ids", "row 5", "row 6"]


def test_an_engine_that_cannot_be_built_ends_the_job(
    source: Path,
    tmp_path: Path,
    local: Local,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(Local, "engine", None)
    job = [*SAMPLED, f"input={source}", f"output={tmp_path / 'out'}", "rows_per_part=4", "decoder.strides=2"]
    monkeypatch.setattr(generate_ray, "answer_with_ray", Local(keeps_engine=False))
    assert generate(job) == 1
    shown = capsys.readouterr().err
    assert shown.count("strides") == 1 and "0 answers" in shown


def test_a_folder_is_read_in_order_and_ids_must_differ(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    write_parquet(folder / "b.parquet", ROWS[3:])
    write_lines(folder / "a.jsonl", [ROWS[0], "", *ROWS[1:3]])
    (folder / "README.md").write_text("not a request")
    job = [*SAMPLED, f"input={folder}", f"output={tmp_path / 'out'}", "rows_per_part=2"]
    config, _ = read_arguments("generate", RayConfig, job)
    assert isinstance(config, RayConfig)
    parts = cut(config)
    assert [(Path(part.path).name, part.first, part.num_rows) for part in parts] == [
        ("a.jsonl", 1, 2),
        ("a.jsonl", 3, 2),
        ("b.parquet", 1, 2),
        ("b.parquet", 3, 2),
    ]
    read = [line for part in parts for line in read_part(part, config)]
    assert [line.request_id for line in read] == [row["id"] for row in ROWS]
    assert read[1].location.endswith("a.jsonl:3")
    write_lines(folder / "c.jsonl", [{"prompt": "a"}])
    write_lines(folder / "d.jsonl", [{"prompt": "a"}])
    refused("IDLM-0465", generate, job)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ("resume=true", "IDLM-0439"),
        ("system=Be brief.", "IDLM-0439"),
        ("rows_per_part=0", "IDLM-0492"),
        ("tensor_parallel=2", "IDLM-0492"),
        ("rows_per_parts=3", "IDLM-0101"),
    ],
)
def test_options_that_a_job_does_not_have(change: str, code: str, source: Path, tmp_path: Path) -> None:
    refused(code, generate, [*SAMPLED, f"input={source}", f"output={tmp_path / 'out'}", change])
    assert not (tmp_path / "out").exists()


def test_answers_of_a_worker_that_died_are_counted_once(
    source: Path,
    tmp_path: Path,
    local: Local,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = tmp_path / "out"
    job = [*SAMPLED, f"input={source}", f"output={folder}", "rows_per_part=4"]
    assert generate(job) == 0
    assert f"{len(ROWS)} answers are new in {folder}, 0 failed" in capsys.readouterr().err
    first = folder / "part-00000.jsonl"
    whole = first.read_text()
    first.unlink()

    def dies_once(parts: Any, *arguments: Any) -> Any:
        first.with_suffix(".jsonl.partial").write_text("".join(whole.splitlines(keepends=True)[:3]))
        return local(parts, *arguments)

    monkeypatch.setattr(generate_ray, "answer_with_ray", dies_once)
    assert generate(job) == 0
    assert "4 answers are new" in capsys.readouterr().err and first.read_text() == whole


def test_a_cluster_that_does_not_answer_is_named() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{server.getsockname()[1]}"
        for named in (address, f"ray://{address}"):
            refused(f"IDLM-0493: .*{named}", check_cluster, named)
        server.listen()
        check_cluster(address)
    for other in ("", "auto", "local"):
        check_cluster(other)


def test_ray_data_gives_the_same_records(
    source: Path, tmp_path: Path, expected: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two engines on a local cluster; then a job that lacks a part."""
    ray = pytest.importorskip("ray", reason="pip install 'ray[data]==2.60.0'")
    monkeypatch.undo()
    ray.init(num_cpus=2, include_dashboard=False)
    try:
        folder = tmp_path / "out"
        job = [*SAMPLED, f"input={source}", f"output={folder}", "rows_per_part=2", "num_engines=2"]
        assert generate(job) == 0
        assert records(folder) == expected
        (folder / "part-00003.jsonl").unlink()
        assert generate(job) == 0
        assert records(folder) == expected
    finally:
        ray.shutdown()
