"""Continue the answers of an earlier run: finished answers are reused, missing and failed ones are generated.

A record belongs to the line of the input with its request id and prompt. It must have been made with the
settings that the line has now: `run_config`, by key of the command line, without defaults."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from idlm.checkpoint import ADAPTER_CONFIG, is_adapter
from idlm.config.schema import changed, plain
from idlm.contracts import SamplingParams
from idlm.errors import UserError
from idlm.files.paths import translate_path_errors
from idlm.infer.cli.config import EngineArguments
from idlm.infer.cli.prompts import PromptLine
from idlm.infer.models.loader import checkpoint_directory
from idlm.infer.settings import EngineSettings
from idlm.lora import WEIGHTS_FILE, AdapterSpec, base_identity
from idlm.semantics import FILE_NAME as SEMANTICS_FILE
from idlm.text.tokenizer import TOKENIZER_FILES

RECORD_KEYS = frozenset({"request_id", "index", "prompt"})
SPEED_ONLY_KEYS = (
    *("device", "tensor_parallel", "attention", "graphs", "warmup", "num_inflight_steps", "deterministic"),
    *("memory", "memory_arena", "max_num_seqs", "max_num_batched_tokens", "page_size", "num_pages"),
    *("prefix_cache", "schedule"),
)
"""Where and how fast the model runs: a resumed run may change these."""
EXCLUDED_KEYS = ("base", "adapters", "accelerators")
"""Keys recorded in another form: base and adapters by their files, accelerators with their options."""
PATH, DIGEST = "model", "model_digest"
MODEL_FILES = (
    *("config.json", "generation_config.json", SEMANTICS_FILE, ADAPTER_CONFIG, WEIGHTS_FILE),
    *TOKENIZER_FILES,
)
MORE_TEMPLATES = "additional_chat_templates/*.jinja"

RunConfig = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeState:
    """What an earlier run left in `source`, by its line numbers: `finished_lines` hold the finished answers,
    and `broken_lines` hold neither a record nor a blank. `missing` yields the lines of the input to answer:
    `num_failed` have a failed sample, the other `num_unanswered` lack one."""

    source: Path
    finished_lines: frozenset[int]
    broken_lines: tuple[int, ...]
    num_failed: int
    num_unanswered: int
    missing: Iterator[PromptLine]

    @property
    def is_whole(self) -> bool:
        return self.num_failed == self.num_unanswered == 0


@dataclass(frozen=True, slots=True)
class _Expected:
    """What the records of one line of the input must have. It stores a hash of the prompt, to save memory."""

    location: str
    num_samples: int
    prompt_hash: int
    run_config: RunConfig


def find_resume_state(
    source: Path,
    read_lines: Callable[[], Iterator[PromptLine]],
    config_of: Callable[[PromptLine], RunConfig],
) -> ResumeState:
    """Match the records of `source` with the lines of `read_lines`; `config_of` returns the settings of a
    line. UserError IDLM-0444 when a record belongs to no line, IDLM-0463 when it was made with other
    settings."""
    expected: dict[str, _Expected] = {}
    shared: RunConfig = {}
    for line in read_lines():
        made = config_of(line)
        # Most lines have the settings of the one before: store them once.
        shared = shared if shared == made else made
        expected[line.request_id] = _Expected(line.location, line.params.n, _hash(line.prompt), shared)
    broken: list[int] = []
    found: dict[str, dict[int, int]] = {}
    failed: set[str] = set()
    for number, record in _records(source, broken):
        request_id, has_failed = record["request_id"], record.get("error") is not None
        _check_record(source, record, expected.get(request_id), has_failed=has_failed)
        found.setdefault(request_id, {})[record["index"]] = number
        if has_failed:
            failed.add(request_id)
    answered = {
        request_id
        for request_id, samples in found.items()
        if request_id not in failed and len(samples) == expected[request_id].num_samples
    }
    return ResumeState(
        source=source,
        finished_lines=frozenset(number for request_id in answered for number in found[request_id].values()),
        broken_lines=tuple(broken),
        num_failed=len(failed),
        num_unanswered=len(expected) - len(answered) - len(failed),
        missing=(line for line in read_lines() if line.request_id not in answered),
    )


def _check_record(source: Path, record: dict[str, Any], line: _Expected | None, *, has_failed: bool) -> None:
    if line is None or _hash(record["prompt"]) != line.prompt_hash:
        shown = json.dumps([record["request_id"], record["index"], record["prompt"]])
        raise UserError(
            "IDLM-0444",
            f"{str(source)!r} has an answer that belongs to no line of the input: {shown:.80}",
            fix="continue with the same input= and system=, or move that file",
        )
    # A failed answer is generated again, so its settings do not matter.
    made = record["run_config"]
    change = None if has_failed else difference(made, line.run_config)
    if change is not None:
        change = change if made else "made by an older version, which did not record its settings"
        raise UserError(
            "IDLM-0463",
            f"{line.location}: its answer in {str(source)!r} was {change}",
            fix=f"resume with the settings it was made with, give another output=, or delete {source}",
        )


def _records(source: Path, broken: list[int]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line numbers and records. Lines that are neither a whole record nor blank are added to `broken`."""
    with source.open("rb") as lines:
        for number, raw in enumerate(lines, start=1):
            record: Any = None
            with contextlib.suppress(ValueError):
                record = json.loads(raw) if raw.endswith(b"\n") else None
            types = {"request_id": str, "index": int, "run_config": dict}
            is_object = isinstance(record, dict) and record.keys() >= RECORD_KEYS
            if is_object and all(isinstance(record.get(key, kind()), kind) for key, kind in types.items()):
                # A record without its settings was made with others: it is refused, never dropped.
                yield number, {"run_config": {}, **record}
            elif raw.strip():
                broken.append(number)


def _hash(prompt: Any) -> int:
    return hash(json.dumps(prompt, sort_keys=True))


def run_config(config: EngineSettings, arguments: EngineArguments) -> dict[str, Any]:
    """What all answers of a run have in common. UserErrors of a path that is not a checkpoint."""
    settings = changed(config, EngineSettings()).items()
    decoder, accelerators = arguments.decoder, arguments.settings["accelerators"]
    values = {
        PATH: str(Path(arguments.model).resolve()),
        DIGEST: model_digest(arguments.model, base=config.base),
        **({"decoder": decoder} if decoder else {}),
        **{f"decoder.{name}": value for name, value in arguments.options.items()},
        **({"accelerators": accelerators} if accelerators else {}),
        **{
            f"adapters.{name}": model_digest(each, base=config.base) for name, each in config.adapters.items()
        },
        **{key: value for key, value in settings if key not in (*SPEED_ONLY_KEYS, *EXCLUDED_KEYS)},
    }
    # YAML has types that JSON lacks (dates). No setting takes them, which the engine reports.
    decoded: dict[str, Any] = json.loads(json.dumps(values, default=str))
    return decoded


def of_request(common: RunConfig, params: SamplingParams) -> dict[str, Any]:
    """`common` and the sampling settings of one request, as JSON returns them."""
    own = {f"sampling.{name}": value for name, value in changed(params, SamplingParams()).items()}
    return {**common, **json.loads(json.dumps(plain(own)))}


def difference(there: RunConfig, here: RunConfig) -> str | None:
    for key in [*here, *there]:
        if key != PATH and there.get(key) != here.get(key):
            return f"made with {_described(there, key)}, and this run has {_described(here, key)}"
    return None


def model_digest(model: str, *, base: str | None = None) -> str:
    """Digest of a checkpoint's configuration, tokenizer and weights (`idlm.lora.base_identity`); of an
    adapter's own files and the small ones of its base, which is at `base` or at the path that they name."""
    with translate_path_errors("IDLM-0600", model, fix="give another model="):
        directory = checkpoint_directory(model)
        folders, digest = [directory], hashlib.sha256()
        if not is_adapter(directory):
            digest.update(base_identity(directory).encode())
        else:
            # The adapter's own files identify the weights of its base, and the engine refuses others.
            base = base or AdapterSpec.load(directory).base_path
            folders += [Path(base)] if base is not None and Path(base).is_dir() else []
        for folder in folders:
            paths = [folder / name for name in MODEL_FILES] + sorted(folder.glob(MORE_TEMPLATES))
            for path in filter(Path.is_file, paths):
                with path.open("rb") as file:
                    content = hashlib.file_digest(file, "sha256").hexdigest()
                digest.update(f"{path.name} {content} ".encode())
    return digest.hexdigest()[:32]


def _described(made: RunConfig, key: str) -> str:
    if key == DIGEST:
        return f"{PATH}={made.get(PATH)} ({DIGEST} {made.get(DIGEST)})"
    return f"{key}={made[key]!r}" if key in made else f"the default of {key}"
