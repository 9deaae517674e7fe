"""Help, typos and missing keys of the command lines: what they say, and that they say it
without importing torch."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from idlm import __version__
from idlm.config.compose import compose, recipes
from idlm.config.schema import lookup, suggest_key
from idlm.config.suggest import ALIASES
from idlm.errors import UserError
from idlm.infer.cli.config import GenerateConfig
from idlm.infer.cli.generate import generate
from idlm.infer.cli.help import from_registry, from_sources
from idlm.infer.cli.serve import serve
from idlm.infer.clients.bench import bench
from idlm.infer.clients.chat import chat
from idlm.infer.decoders.base import DECODERS
from idlm.infer.evaluation.config import EvaluateConfig
from idlm.infer.evaluation.evaluate import run_evaluation
from idlm.infer.server.config import ServeConfig
from idlm.infer.sparse.accelerator import ACCELERATORS
from idlm.train.cli import main as train
from idlm.train.config.schema import TrainConfig

ROOT = Path(__file__).resolve().parents[3]
HEAVY = ("torch", "transformers", "numpy", "datasets", "deepspeed")
PROBE = f"""
import json, sys
from idlm.infer.cli import generate
from idlm.infer.cli import import_adapter, serve
from idlm.infer.evaluation import evaluate
from idlm.infer.clients import bench, chat
from idlm.train.cli import main
for name, arguments in json.loads(sys.argv[1]):
    sys.argv = [name, *arguments]
    mains = {{"idlm-generate": generate, "idlm-eval": evaluate, "idlm-serve": serve}}
    mains |= {{"idlm-chat": chat, "idlm-bench": bench, "idlm-import": import_adapter}}
    status = mains[name].main() if name in mains else main()
    loaded = [module for module in {HEAVY} if module in sys.modules]
    assert not loaded, (name, arguments, loaded)
    assert status == (0 if arguments[0][0] == "-" else 2), (name, arguments, status)
"""
COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "idlm-train": train,
    "idlm-generate": generate,
    "idlm-eval": run_evaluation,
    "idlm-serve": serve,
    "idlm-chat": chat,
    "idlm-bench": bench,
}


def test_help_typos_and_missing_keys_do_not_import_torch() -> None:
    lines = [(name, [argument]) for name in COMMANDS for argument in ("-h", "--version", "typo=1")]
    lines += [
        ("idlm-train", ["recipe=qwen3_8b"]),
        ("idlm-train", ["recipe=tinny"]),
        ("idlm-generate", ["sampling.temperature=0"]),
        ("idlm-generate", ["model=x", "input=nowhere.jsonl"]),
        ("idlm-eval", ["num=3"]),
        ("idlm-serve", ["port=8001"]),
        ("idlm-chat", ["url=http://127.0.0.1:1", "device=cpu"]),
        ("idlm-bench", ["concurrency=1,2"]),
        *(("idlm-import", [argument]) for argument in ("-h", "--version", "typo=1", "model=x")),
    ]
    done = subprocess.run(
        [sys.executable, "-c", PROBE, json.dumps(lines)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for words in ("model.path is missing", "data.path is empty", "IDLM-0438", "IDLM-0430", "'tiny'"):
        assert words in done.stderr


@pytest.mark.parametrize("name", COMMANDS)
def test_help_begins_with_what_a_newcomer_needs(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert COMMANDS[name](["-h"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"usage: {name} ")
    headings = [
        *(["Recipes:"] if name == "idlm-train" else []),
        *("Examples:", "Most used keys:", "Flags:", "All keys"),
    ]
    indices = [text.index(f"\n{heading}") for heading in headings]
    assert indices == sorted(indices)
    examples = text[text.index("\nExamples:") : text.index("\nMost used keys:")]
    assert examples.count(f"  {name} ") >= 2
    listed = text[text.index("\nAll keys") :]
    own = {"idlm-train": "train.", "idlm-serve": "port", "idlm-chat": "url"}.get(name, "output")
    assert all(f"\n{key}" in listed for key in (own, "output" if name == "idlm-train" else "sampling."))


def test_help_of_training_describes_each_recipe_in_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert train(["--help"]) == 0
    text = capsys.readouterr().out
    shown = text[text.index("\nRecipes:") : text.index("\nExamples:")].strip().splitlines()[1:]
    assert [line.split()[0] for line in shown] == recipes()
    assert all(30 < len(line) < 140 for line in shown)


@pytest.mark.parametrize("name", COMMANDS)
def test_version_is_that_of_the_package(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert COMMANDS[name](["--version"]) == 0
    assert capsys.readouterr().out == f"idlm {__version__}\n"


@pytest.mark.parametrize(
    ("schema", "given", "meant"),
    [
        (TrainConfig, "train.lr", "train.learning_rate"),
        (TrainConfig, "lr", "train.learning_rate"),
        (TrainConfig, "epochs", "train.epochs"),
        (TrainConfig, "train.bs", "train.batch_size"),
        (TrainConfig, "batch-size", "train.batch_size"),
        (TrainConfig, "seq_len", "train.max_length"),
        (TrainConfig, "train.learnin_rate", "train.learning_rate"),
        (GenerateConfig, "max_new_tokens", "sampling.max_tokens"),
        (GenerateConfig, "max_model_len", "max_length"),
        (GenerateConfig, "model_path", "model"),
        (GenerateConfig, "system_prompt", "system"),
        (EvaluateConfig, "limit", "num"),
        (ServeConfig, "max_model_len", "max_length"),
    ],
)
def test_names_of_other_trainers_and_engines_are_understood(schema: type, given: str, meant: str) -> None:
    assert suggest_key(schema, given) == meant


def test_every_alias_names_a_key_that_exists() -> None:
    schemas = (TrainConfig, GenerateConfig, EvaluateConfig)
    for name, keys in ALIASES.items():
        assert all(any(lookup(schema, key) is not None for schema in schemas) for key in keys), name


def test_flags_of_other_programs_are_answered_with_the_key() -> None:
    with pytest.raises(UserError) as refusal:
        compose("train", TrainConfig, ["--learning-rate=1", "--train.steps", "--lr=2", "train.lr=3"])
    for words in (
        "'--learning-rate=1'; write train.learning_rate=VALUE",
        "'--train.steps'; write train.steps=VALUE",
        "'--lr=2'; write train.learning_rate=VALUE",
        "'train.lr'; did you mean 'train.learning_rate'?",
    ):
        assert words in refusal.value.message


PLUGINS = [
    ("decoder", "idlm.infer.decoders", DECODERS),
    ("accelerator", "idlm.infer.accelerators", ACCELERATORS),
]


@pytest.mark.parametrize(("kind", "package", "registry"), PLUGINS)
def test_help_on_plugins_from_their_source_is_that_of_the_plugins(
    kind: str, package: str, registry: object
) -> None:
    assert from_sources(package, f"{kind.upper()}S") == from_registry(registry)  # type: ignore[arg-type]
