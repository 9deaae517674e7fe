"""Answer a large file or a folder of files with Ray Data: an engine for each GPU (or CPU slot) of a cluster.

    python recipes/generate_ray.py model=PATH input=prompts.parquet output=FOLDER sampling.max_tokens=512

`input=` is JSON lines or Parquet, in the form of `idlm-generate`, or a folder of such files. It is
cut into parts of `rows_per_part` rows. An engine answers a part as `idlm-generate input= output= resume=true`
would, into FOLDER/part-00000.jsonl: the records have the same fields, `cat FOLDER/part-*.jsonl` has the order
of the input, and a job that is started again answers only what is missing. Every row has a random stream of
its own, made of sampling.seed and its id (a row may give its own seed), so its answer depends on the engine
that gives it and on restarts only as far as another batch rounds otherwise: in bfloat16 some answers differ
after a worker died, in float32 hardly one, and none with deterministic=true. `decoder.adaptive=true` is the
exception, as everywhere.

All machines see model, input and output under the same paths. RAY_ADDRESS names a cluster; without it one is
started on this machine. Tested with ray 2.60.0 (pip install 'ray[data]==2.60.0')."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from idlm.cli import command
from idlm.config.schema import option
from idlm.contracts import plain_value
from idlm.errors import UserError
from idlm.files.paths import DAMAGE, PACKINGS, unpacked
from idlm.files.records import without_nulls
from idlm.infer.cli.batch import answer_lines, resume_state
from idlm.infer.cli.config import EngineArguments, GenerateConfig, read_arguments
from idlm.infer.cli.output import exclusive_output
from idlm.infer.cli.prompts import PromptLine, check_prompts, read_lines
from idlm.infer.cli.resume import RunConfig, run_config

SUFFIXES = (".jsonl", *(f".jsonl{packing}" for packing in PACKINGS), ".parquet")
NOT_HERE = ("prompt", "describe", "overwrite", "resume", "system")
"""Options of `idlm-generate` that a job does not have."""
CONNECT_SECONDS = 20.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class RayConfig(GenerateConfig):
    """Options of a job: those of `idlm-generate` but `NOT_HERE`, and its own."""

    output: str | None = option("folder of the parts", None)
    num_engines: int | None = option("engines; null is one for each GPU of the cluster, or one", None)
    rows_per_part: int = option("rows that an engine takes at once", 1024)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """Rows of one input file: `num_rows` from row `first` (the first of a file is 1), which begins `offset`
    bytes into the unpacked text (of JSON lines)."""

    number: int
    path: str
    first: int
    num_rows: int
    offset: int = 0

    @property
    def name(self) -> str:
        return f"part-{self.number:05d}.jsonl"


class PartAnswerer:
    """An engine that answers parts; Ray Data calls one for each GPU."""

    def __init__(self, config: RayConfig, arguments: EngineArguments, common: RunConfig) -> None:
        self._config, self._common = config, common
        self._refusal: UserError | None = None
        try:
            self._engine = arguments.load(is_shown=False)
        # Ray would start an engine that cannot be built again and again.
        except UserError as refusal:
            self._refusal = refusal

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, list[Any]]:
        """Answer one part. `batch` has its fields, each as an array of one element. Returns the error of a
        row that the engine refuses, so that the other parts continue, or of the engine."""
        part = Part(**{name: plain_value(values[0]) for name, values in batch.items()})
        config, read = job_of(part, self._config)
        error = ""
        try:
            if self._refusal is not None:
                raise self._refusal
            with exclusive_output(config.output, overwrite=False, resume=True):
                earlier = resume_state(config, read, self._common)
                answer_lines(self._engine, config, read, earlier, self._common)
        except UserError as refusal:
            error = str(refusal)
        return {"error": [error]}


def main() -> int:
    return command.run(generate)


def generate(arguments: list[str]) -> int:
    """Run a job; returns 1 if some requests failed or were refused."""
    if command.has_help_flag(arguments):
        from idlm.cli.help import describe

        print(f"{__doc__}\n{describe(RayConfig)}")
        return 0
    config, engine_arguments = read_arguments("generate", RayConfig, arguments)
    check_job(config)
    parts = cut(config)
    check_prompts((line for part in parts for line in read_part(part, config)), source=config.input)
    common = run_config(config, engine_arguments)
    Path(str(config.output)).mkdir(parents=True, exist_ok=True)
    check_folder(config, parts)
    missing = [part for part in parts if not is_answered(part, config, common)]
    if not missing:
        print(f"{config.output} is complete", file=sys.stderr)
        return 0
    num_before, _ = count_answers(config)
    errors = {result["error"] for result in answer_with_ray(missing, config, engine_arguments, common)} - {""}
    for error in sorted(errors):
        print(error, file=sys.stderr)
    num_now, num_failed = count_answers(config)
    print(f"{num_now - num_before} answers are new in {config.output}, {num_failed} failed", file=sys.stderr)
    return int(num_failed > 0 or bool(errors))


def count_answers(config: RayConfig) -> tuple[int, int]:
    """Answers in the folder, and failed ones. A worker that died has answers in it that no result counts."""
    num_answers = num_failed = 0
    for path in Path(str(config.output)).glob("part-*.jsonl*"):
        for line in path.read_bytes().splitlines():
            # The last line of a file may be cut.
            with suppress(ValueError):
                has_failed = json.loads(line).get("error") is not None
                num_failed += has_failed
                num_answers += not has_failed
    return num_answers, num_failed


def answer_with_ray(
    parts: list[Part], config: RayConfig, arguments: EngineArguments, common: RunConfig
) -> list[dict[str, Any]]:
    """Answer parts on the cluster; returns what `PartAnswerer` returns for each. UserError IDLM-0491 without
    Ray, IDLM-0493 where the named cluster does not answer."""
    check_cluster(os.environ.get("RAY_ADDRESS", ""))
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
        import ray.data
    except ModuleNotFoundError as error:
        fix = "pip install 'ray[data]==2.60.0'"
        raise UserError("IDLM-0491", f"the recipe needs the package {error.name}", fix=fix) from error
    if not ray.is_initialized():
        ray.init()
    num_gpus = 0 if config.device == "cpu" else int(ray.cluster_resources().get("GPU", 0))
    rows = ray.data.from_items([dataclasses.asdict(part) for part in parts], override_num_blocks=len(parts))
    answered = rows.map_batches(
        PartAnswerer,
        fn_constructor_args=(config, arguments, common),
        compute=ray.data.ActorPoolStrategy(size=min(config.num_engines or num_gpus or 1, len(parts))),
        batch_size=1,
        num_gpus=int(num_gpus > 0),
    )
    results: list[dict[str, Any]] = answered.take_all()
    return results


def check_cluster(address: str) -> None:
    """UserError IDLM-0493 where `host:port` accepts no connection, for which Ray would wait for ever."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not (colon and port.isdigit()):
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_SECONDS).close()
    except OSError as error:
        raise UserError(
            "IDLM-0493",
            f"no Ray cluster answers at RAY_ADDRESS={address}: {error}",
            fix="start it there (ray start --head), or unset RAY_ADDRESS to start one on this machine",
        ) from error


def check_job(config: RayConfig) -> None:
    """Raise UserError IDLM-0439 for options that are missing, or that a job does not have."""
    given = [name for name in NOT_HERE if getattr(config, name)]
    if given:
        fix = "leave it out: a job always resumes, and a system prompt is a message of a row"
        raise UserError("IDLM-0439", f"{given[0]}= is an option of idlm-generate alone", fix=fix)
    if config.input is None or config.output is None:
        raise UserError(
            "IDLM-0439", "a job needs input= and output=", fix="give a file or folder, and a folder"
        )
    for name, value in (("rows_per_part", config.rows_per_part), ("num_engines", config.num_engines or 1)):
        if value < 1:
            raise UserError("IDLM-0492", f"{name}={value} must be >= 1", fix="give a positive number")
    if config.tensor_parallel > 1:
        message = f"tensor_parallel={config.tensor_parallel}: an engine of this recipe has one GPU"
        raise UserError("IDLM-0492", message, fix="use idlm-generate for a model that needs several")


def check_folder(config: RayConfig, parts: list[Part]) -> None:
    """Raise UserError IDLM-0446 for answers in the folder that belong to no part."""
    names = {part.name for part in parts}
    found = Path(str(config.output)).glob("part-*.jsonl*")
    strange = [path for path in found if f"{path.name.partition('.')[0]}.jsonl" not in names]
    if strange:
        message = f"{str(min(strange))!r} is no part of this input in parts of {config.rows_per_part} rows"
        raise UserError(
            "IDLM-0446", message, fix="give the rows_per_part= it was made with, or another output="
        )


def is_answered(part: Part, config: RayConfig, common: RunConfig) -> bool:
    job, read = job_of(part, config)
    earlier = resume_state(job, read, common)
    return earlier is not None and earlier.is_whole and earlier.source == Path(str(job.output))


def job_of(part: Part, config: RayConfig) -> tuple[RayConfig, Any]:
    output = Path(str(config.output)) / part.name
    job = dataclasses.replace(config, input=part.path, output=str(output), resume=True, stats=False)
    return job, partial(read_part, part, config)


def cut(config: RayConfig) -> list[Part]:
    """The parts of the input, in order. UserError IDLM-0430 for an input that cannot be read."""
    source, parts = Path(str(config.input)), list[Part]()
    paths = (
        sorted(path for path in source.iterdir() if path.name.endswith(SUFFIXES))
        if source.is_dir()
        else [source]
    )
    for path in paths:
        try:
            starts = _starts(path, config.rows_per_part)
        # pyarrow's error of a file that is not Parquet is a ValueError.
        except (*DAMAGE, ValueError) as error:
            fix = "give whole JSON lines or Parquet, or a folder of such files"
            raise UserError("IDLM-0430", f"input={str(path)!r} cannot be read: {error}", fix=fix) from error
        for first, num_rows, offset in starts:
            number = len(parts)
            parts.append(Part(number=number, path=str(path), first=first, num_rows=num_rows, offset=offset))
    return parts


def _starts(path: Path, size: int) -> list[tuple[int, int, int]]:
    num_rows, offset, offsets = 0, 0, dict[int, int]()
    if path.suffix == ".parquet":
        num_rows = _parquet(path).metadata.num_rows
    else:
        with path.open("rb") as file:
            for line in unpacked(file, path):
                if num_rows % size == 0:
                    offsets[num_rows] = offset
                num_rows, offset = num_rows + 1, offset + len(line)
    return [(row + 1, min(size, num_rows - row), offsets.get(row, 0)) for row in range(0, num_rows, size)]


def read_part(part: Part, config: RayConfig) -> Iterator[PromptLine]:
    """The requests of a part, each with a seed of its own; blank lines are skipped."""
    sampling = dataclasses.replace(config.sampling, seed=None)
    options = {"drop_last_turn": config.drop_last_turn, "carry_keys": config.carry_keys}
    for line in read_lines(part.path, _rows(part), sampling, first=part.first, **options):
        seed = line.params.seed
        seed = seed_of(config.sampling.seed, line.request_id) if seed is None else seed
        yield dataclasses.replace(line, params=line.params.with_seed(seed))


def seed_of(seed: int | None, request_id: str) -> int:
    """A seed in [0, 2**63) that depends on the job's seed and the row's id alone."""
    digest = hashlib.sha256(f"{seed or 0}:{request_id}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def _rows(part: Part) -> Iterator[bytes]:
    path = Path(part.path)
    if path.suffix == ".parquet":
        yield from _parquet_rows(part)
        return
    with path.open("rb") as file:
        lines = unpacked(file, path)
        if lines.seekable():
            lines.seek(part.offset)
        else:
            for _ in range(part.first - 1):
                lines.readline()
        for _ in range(part.num_rows):
            yield lines.readline()


def _parquet_rows(part: Part) -> Iterator[bytes]:
    """Columns become keys, without those that are null; only the row groups that hold the part are read."""
    file, start, end = _parquet(Path(part.path)), part.first - 1, part.first - 1 + part.num_rows
    row = 0
    for group in range(file.num_row_groups):
        num_rows = file.metadata.row_group(group).num_rows
        if row < end and row + num_rows > start:
            for record in file.read_row_group(group).to_pylist()[max(0, start - row) : end - row]:
                yield json.dumps(without_nulls(record), default=str).encode()
        row += num_rows


def _parquet(path: Path) -> Any:
    from pyarrow.parquet import ParquetFile

    return ParquetFile(path)


if __name__ == "__main__":
    sys.exit(main())
