"""Tasks of lm-eval (EleutherAI's lm-evaluation-harness) with an engine as their model, offline. A task keeps
its own prompts, filters and metrics; its problems are read from the file `data=`."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lm_eval.tasks
from datasets import load_dataset
from lm_eval import simple_evaluate
from lm_eval.api.model import TemplateLM
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from idlm.config.suggest import did_you_mean
from idlm.errors import UserError, naming, some_of
from idlm.infer.evaluation.requests import EngineRequests

UNSAFE = re.compile(r"^[\"']?unsafe_code[\"']?:\s*true", re.MULTILINE | re.IGNORECASE)
TASK = re.compile(r"^[\"']?task[\"']?:[ \t]*[\"']?([\w.-]+)[\"']?[ \t]*$", re.MULTILINE)
INCLUDE = re.compile(r"^[\"']?include[\"']?:\s*[\"']?([^\s\"']+)", re.MULTILINE)
FORMATS = {".parquet": "parquet", ".csv": "csv"}
"""Builders of `datasets` by the ending of a file; JSON otherwise."""


class EngineLM(TemplateLM):
    def __init__(self, requests: EngineRequests) -> None:
        super().__init__()
        self._requests, self.tokenizer = requests, requests.engine.tokenizer

    @property
    def eot_token_id(self) -> int:
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """What a text without context is conditioned on."""
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else int(bos)

    @property
    def tokenizer_name(self) -> str:
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        return self._requests.encode(string, add_special_tokens=add_special_tokens)

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        return self._requests.render_chat(chat_history, open_turn=add_generation_prompt)

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        return self._requests.generate_until([request.args for request in requests])

    def _loglikelihood_tokens(self, requests: Sequence[Any], **_: Any) -> list[tuple[float, bool]]:
        return self._requests.loglikelihood([(context, text) for _, context, text in requests])

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of whole texts, in windows of the engine's `max_length`."""
        longest = self._requests.engine.table.max_length - 2
        cut = functools.partial(
            get_rolling_token_windows, prefix_token=self.prefix_token_id, max_seq_len=longest, context_len=1
        )
        texts = [self.tok_encode(request.args[0], add_special_tokens=False) for request in requests]
        windows = [[*map(make_disjoint_window, cut(token_list=ids))] for ids in texts]
        scores = iter(self._requests.loglikelihood([pair for each in windows for pair in each]))
        return [sum(next(scores)[0] for _ in each) for each in windows]


@dataclasses.dataclass(frozen=True, slots=True)
class LocalTask:
    """Tasks of lm-eval whose problems come from files: one, or one for each subject of MMLU."""

    name: str
    paths: dict[str, str]
    """By the name of each task, the YAML file that includes lm-eval's own."""

    def run(self, requests: EngineRequests, num: int | None) -> dict[str, Any]:
        results: dict[str, Any] = simple_evaluate(
            model=EngineLM(requests),
            tasks=list(self.paths.values()),
            limit=num,
            bootstrap_iters=1000,
            apply_chat_template=requests.is_chat,
            task_manager=TaskManager(include_defaults=False),
        )
        return results

    def combined(self, results: dict[str, Any]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """Samples and metrics of lm-eval's results; those of several tasks together, every problem alike."""
        if len(self.paths) == 1:
            return results["samples"][self.name], results["results"][self.name]
        pairs = [(name, sample) for name in self.paths for sample in results["samples"][name]]
        samples = [{**sample, "task": name, "doc_id": index} for index, (name, sample) in enumerate(pairs)]
        sizes = {name: len(results["samples"][name]) for name in self.paths}
        figures = results["results"][next(iter(self.paths))]
        means = {
            key: sum(results["results"][name][key] * size for name, size in sizes.items()) / len(samples)
            for key, value in figures.items()
            if isinstance(value, float) and "_stderr" not in key
        }
        return samples, means


@dataclasses.dataclass(frozen=True, slots=True)
class ProblemFiles:
    """Where the problems of a task are, and the examples of its prompts, if they are in a file."""

    data: str
    fewshot_data: str | None = None
    num_fewshot: int | None = None
    """None: the task's own number."""

    def settings(self, folder: str) -> dict[str, Any]:
        files = {"test": str(Path(self.data).resolve())}
        if self.fewshot_data is not None:
            files["train"] = str(Path(self.fewshot_data).resolve())
        split = None if self.fewshot_data is None else "train"
        return {
            "dataset_path": FORMATS.get(Path(self.data).suffix, "json"),
            "dataset_name": None,
            "dataset_kwargs": {"data_files": files, "cache_dir": str(Path(folder) / "cache")},
            "validation_split": None,
            "training_split": split,
            "fewshot_split": split,
            "test_split": "test",
        }


def local_tasks(name: str, files: ProblemFiles, folder: str) -> LocalTask:
    """As `local_task`; `mmlu` is the tasks of all subjects of its file, which have a field `subject`."""
    if name != "mmlu":
        return local_task(name, files, folder)
    problems = _by_subject(files.data, folder, "test")
    examples = {} if files.fewshot_data is None else _by_subject(files.fewshot_data, folder, "dev")
    lacking = sorted(set(problems) - set(examples)) if examples else []
    if lacking:
        raise UserError(
            "IDLM-0487",
            f"fewshot_data={files.fewshot_data!r} has no examples of {some_of(lacking)}",
            fix="give the file of all subjects",
        )
    paths: dict[str, str] = {}
    for subject, path in problems.items():
        own = ProblemFiles(path, examples.get(subject), files.num_fewshot)
        paths |= local_task(f"mmlu_{subject}", own, folder).paths
    return LocalTask(name, paths)


def _by_subject(data: str, folder: str, split: str) -> dict[str, str]:
    kind, cache = FORMATS.get(Path(data).suffix, "json"), str(Path(folder) / "cache")
    fix = "give subject, question, choices and answer, or one subject's file with task=mmlu_SUBJECT"
    with naming("IDLM-0487", f"{data!r} is not a file of MMLU's problems", fix=fix):
        rows = load_dataset(kind, data_files=str(Path(data).resolve()), split="train", cache_dir=cache)
        subjects = sorted(set(rows["subject"]))
    found: dict[str, list[str]] = {subject: [] for subject in subjects}
    for row in rows:
        found[row["subject"]].append(json.dumps(row))
    paths = {subject: Path(folder) / f"{split}-{index}.jsonl" for index, subject in enumerate(found)}
    for subject, path in paths.items():
        path.write_text("\n".join(found[subject]), encoding="utf-8")
    return {subject: str(path) for subject, path in paths.items()}


def local_task(name: str, files: ProblemFiles, folder: str) -> LocalTask:
    """Make the task `name` read the `files`, and build its first request. UserError IDLM-0487 for an unknown
    task, one that runs code, files of another task, and examples that no prompt has."""
    sources = _sources()
    if name not in sources:
        raise UserError(
            "IDLM-0487",
            f"task={name!r}: lm-eval has no such task{did_you_mean(name, sources)}",
            fix="give the name of one of its tasks (lm-eval ls tasks); groups are not run",
        )
    source = sources[name]
    if any(UNSAFE.search(text) for text in _texts(source)):
        raise UserError(
            "IDLM-0487",
            f"task={name} of lm-eval runs programs of the model without a sandbox",
            fix="leave harness= out: humaneval and mbpp run in the sandbox of idlm with allow_code=true",
        )
    settings: dict[str, Any] = {"include": str(source), "task": name, **files.settings(folder)}
    writes_examples = any("fewshot_config:" in text for text in _texts(source))
    if files.num_fewshot is not None:
        settings["num_fewshot"] = files.num_fewshot
    elif files.fewshot_data is None and not writes_examples:
        settings["num_fewshot"] = 0
    path = Path(folder) / f"{name}.yaml"
    # JSON is YAML.
    path.write_text(json.dumps(settings), encoding="utf-8")
    _stay_offline()
    try:
        task = TaskManager(include_defaults=False).load([str(path)])["tasks"][name]
        task.build_all_requests(limit=1)
        num_fewshot = int(task.config.num_fewshot or 0)
    except UserError:
        raise
    # Templates, filters and `datasets` raise many kinds of errors for missing fields.
    except Exception as error:
        fix = f"install what it names, or give the problems of this task, with the fields of {source}"
        if "antlr4" in str(error):
            fix = "leave harness= out and take task=math500: this one needs another antlr4 runtime than hydra"
        problem = f"task={name} of lm-eval cannot be made from data={files.data!r}"
        what = f": {type(error).__name__}: {error}"
        raise UserError("IDLM-0487", problem + what, fix=fix) from error
    if files.fewshot_data is not None and num_fewshot == 0:
        raise UserError(
            "IDLM-0487",
            f"task={name} of lm-eval has prompts without examples, and fewshot_data={files.fewshot_data!r}",
            fix="give num_fewshot=5, for example, or leave fewshot_data= out",
        )
    return LocalTask(name, {name: str(path)})


def _stay_offline() -> None:
    """Make nltk refuse to download its data, which lm-eval's IFEval requests."""
    try:
        import nltk
    except ModuleNotFoundError:
        return

    def refuse(name: str, *_: Any, **__: Any) -> None:
        raise UserError(
            "IDLM-0487",
            f"the task reads nltk's {name}, which is not on this machine",
            fix=f"run python -m nltk.downloader {name}; without network, copy nltk_data/tokenizers/{name} of "
            f"another machine to {Path.home() / 'nltk_data' / 'tokenizers' / name}",
        )

    nltk.download = refuse


@functools.cache
def _sources() -> dict[str, Path]:
    """The files of lm-eval's tasks by name. Its own index parses all of them, which takes half a minute."""
    folder = Path(str(lm_eval.tasks.__file__)).parent
    found = ((TASK.search(path.read_text(encoding="utf-8")), path) for path in folder.rglob("*.yaml"))
    return {match[1]: path for match, path in found if match is not None}


def _texts(path: Path) -> list[str]:
    text = path.read_text(encoding="utf-8")
    return [text, *(part for each in INCLUDE.findall(text) for part in _texts(path.parent / each))]
