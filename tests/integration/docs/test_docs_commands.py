"""Every command of README.md, CONTRIBUTING.md and docs/ is one that the programs understand.

They are composed (`idlm-train`), described on a small checkpoint (`idlm-generate`) or run on one prompt
(`idlm-eval`), so every option exists. A block whose commands need more than this repository says so in a
comment before it."""

from __future__ import annotations

import ast
import dataclasses
import json
import re
import shlex
import shutil
import tomllib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from idlm.cli.command import has_help_flag
from idlm.cli.help import describe
from idlm.cli.main import run_command
from idlm.config.compose import compose, recipes
from idlm.config.project import commands as commands_of_idlm
from idlm.infer.cli.config import GenerateConfig, read_arguments
from idlm.infer.cli.generate import generate
from idlm.infer.cli.import_adapter import ImportConfig
from idlm.infer.clients.bench import with_brackets
from idlm.infer.clients.config import BenchConfig, ChatConfig
from idlm.infer.doctor.command import read_config as read_doctor
from idlm.infer.evaluation.config import EvaluateConfig
from idlm.infer.evaluation.evaluate import run_evaluation
from idlm.infer.server.config import ServeConfig
from idlm.semantics import Semantics
from idlm.train.compare import compare
from idlm.train.config.schema import TrainConfig
from tests.errors import refused

ROOT = Path(__file__).resolve().parents[3]
TINY = ROOT / "recipes" / "assets" / "tiny_ar"
BUNDLED = [str(path.relative_to(ROOT)) for path in (ROOT / "recipes" / "assets").iterdir()]
SPARE_ROW = 170
PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")),
]
BLOCK = re.compile(r"(?:^<!-- (?P<mark>[^\n]*) -->\n)?^```bash\n(?P<body>.*?)^```", re.DOTALL | re.MULTILINE)
CLIENTS = {"idlm-serve": ServeConfig, "idlm-chat": ChatConfig, "idlm-bench": BenchConfig}
"""Commands that are composed by their schema."""
OTHERS = ("curl", "genai-bench", "guidellm", "aiperf", "vllm")
"""Programs of others, whose arguments no test here knows."""
MARKS = ("needs: ", "run by hand: ")
PLACEHOLDER = re.compile(r"<[\w .-]+>")
PROGRAM = re.compile(r"(?:\.venv/bin/)?([\w.-]+)")


GENERATE_OPTION = re.compile(r"`((?:decoder|sampling|accelerators)\.[a-z_.]*[a-z_])")
TRAIN_OPTION = re.compile(
    r"`((?:model|adapter|data|train|export|report|eval|wandb|tensorboard|plan)\.[a-z_.]*[a-z_])[=` ]"
)
NAME = re.compile(r"`([a-z_]+)(?:=[^`]*)?`")


class Command(NamedTuple):
    """One command: where it stands, its words, and the comment before its block."""

    page: str
    words: list[str]
    mark: str | None


def commands(page: str) -> Iterator[Command]:
    """The commands of a page, continued lines joined, without comments and variables."""
    for block in BLOCK.finditer((ROOT / page).read_text(encoding="utf-8")):
        for line in block["body"].replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            while words and re.match(r"[A-Z_]+=", words[0]):
                words = words[1:]
            if words[:1] == ["idlm"] and words[1:] and words[1] in commands_of_idlm():
                words = [f"idlm-{words[1]}", *words[2:]]
            if words:
                yield Command(page, words, block["mark"])


EVERY = [command for page in PAGES for command in commands(page)]
LAUNCHES = [command for command in EVERY if command.words[0].startswith("recipes/launch/")]


def program(command: Command) -> str:
    found = PROGRAM.fullmatch(command.words[0])
    return found[1] if found else command.words[0]


def named(*names: str) -> list[Command]:
    return [command for command in EVERY if program(command) in names]


def shown(command: Command) -> str:
    return f"{command.page}: {' '.join(command.words)[:60]}"


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small checkpoints where commands look for the demo's."""
    folder = tmp_path_factory.mktemp("workplace")
    block = Semantics(causality="block", logit_shift=False, block_size=4, mask_token_id=SPARE_ROW)
    full = Semantics(causality="full", logit_shift=False, mask_token_id=SPARE_ROW)
    converted = Semantics(mask_token_id=SPARE_ROW, stride=4)
    for name, meaning in (("tiny", converted), ("tiny_block", block), ("tiny_full", full)):
        shutil.copytree(TINY, folder / "outputs" / name)
        meaning.save(folder / "outputs" / name)
    (folder / "gsm8k_test.jsonl").write_text('{"question": "1+1?", "answer": "#### 2"}\n')
    return folder


@pytest.fixture(autouse=True)
def quiet_folder(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(workplace)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def with_small_model(words: list[str]) -> list[str]:
    """The arguments with checkpoints that are there in place of others."""
    special = [word[8:] for word in words if word in ("decoder=block", "decoder=full")]
    small = "_".join(["outputs/tiny", *special])
    words = [re.sub(r"^model=.*", f"model={small}", word) for word in words]
    return [re.sub(r"^compare=(<base>|recipes/.*)", f"compare={TINY}", word) for word in words]


def test_every_program_is_known_to_these_tests() -> None:
    known = {
        "idlm-train",
        "idlm-generate",
        "idlm-eval",
        "idlm-import",
        "idlm-doctor",
        "idlm-report",
        "idlm",
        *CLIENTS,
        "make",
        "pip",
        "python",
        "echo",
        *OTHERS,
    }
    assert not [shown(each) for each in EVERY if each not in LAUNCHES and program(each) not in known]
    assert len(named("idlm-train")) > 5 and len(named("idlm-generate")) > 5 and len(named("idlm-eval")) > 2


@pytest.mark.parametrize("command", EVERY, ids=shown)
def test_what_cannot_run_here_is_marked(command: Command) -> None:
    is_marked = command.mark is not None and command.mark.startswith(MARKS)
    has_gap = any(PLACEHOLDER.search(word) for word in command.words)
    assert is_marked or not has_gap, "a block with a placeholder says `<!-- needs: ... -->`"
    models = [word.removeprefix("model=") for word in command.words if word.startswith("model=")]
    from_here = all(
        (model.startswith("outputs/") and model[8:] in recipes()) or model in BUNDLED for model in models
    )
    assert is_marked or from_here
    assert is_marked or command not in LAUNCHES


@pytest.mark.parametrize("command", named("idlm-train"), ids=shown)
def test_idlm_train_composes(command: Command) -> None:
    if has_help_flag(command.words):
        return
    compose("train", TrainConfig, command.words[1:])


@pytest.mark.parametrize("command", LAUNCHES, ids=shown)
def test_launchers_exist_and_their_options_compose(command: Command) -> None:
    script, arguments = ROOT / command.words[0], command.words[1:]
    assert script.is_file()
    recipe = script.stem.removesuffix("_multinode")
    assert any(word.startswith("recipe=") for word in arguments) == (recipe not in recipes())
    compose("train", TrainConfig, [f"recipe={recipe}"] * (recipe in recipes()) + arguments)


@pytest.mark.parametrize("command", named("idlm-generate"), ids=shown)
def test_idlm_generate_understands(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = with_small_model(command.words[1:])
    assert any(word.startswith("model=") for word in arguments)
    if any(word.startswith("adapters.") for word in arguments):
        # No folder here is an adapter.
        assert compose("generate", GenerateConfig, arguments).adapters
        return
    assert generate([*arguments, "describe=true"]) == 0
    decoder = next((word[8:] for word in arguments if word.startswith("decoder=")), "isd")
    assert f"decoder     {decoder}" in capsys.readouterr().out


@pytest.mark.sweep_but(1)
@pytest.mark.parametrize("command", named("idlm-eval"), ids=shown)
def test_idlm_eval_runs(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    replaced = ("num=", "sampling.max_tokens=", "decoder.block_length=")
    arguments = [word for word in with_small_model(command.words[1:]) if not word.startswith(replaced)]
    if "harness=lm_eval" in arguments or "allow_code=true" in arguments:
        # One needs an extra, the other a sandbox: tests of their own run them where there are any.
        read_arguments("eval", EvaluateConfig, arguments)
        return
    assert run_evaluation([*arguments, "num=1", "sampling.max_tokens=2", "device=cpu"]) == 0
    assert "exact-match" in capsys.readouterr().out


@pytest.mark.parametrize("command", named("idlm-import"), ids=shown)
def test_idlm_import_understands(command: Command) -> None:
    config = compose("import", ImportConfig, command.words[1:])
    assert config.model and config.output_dir


@pytest.mark.parametrize("command", named("idlm-doctor"), ids=shown)
def test_idlm_doctor_understands(command: Command) -> None:
    read_doctor(command.words[1:])


@pytest.mark.parametrize("command", named("idlm-report"), ids=shown)
def test_idlm_report_understands(command: Command) -> None:
    refused("no run/metrics.jsonl in outputs/tiny", compare, command.words[1:])


@pytest.mark.parametrize("command", named("idlm"), ids=shown)
def test_idlm_itself_runs(command: Command) -> None:
    assert run_command(command.words[1:]) == 0


@pytest.mark.parametrize("command", named(*CLIENTS), ids=shown)
def test_servers_and_clients_compose(command: Command) -> None:
    name, words = program(command), list(map(with_brackets, command.words[1:]))
    read_arguments(name.removeprefix("idlm-"), CLIENTS[name], words)


@pytest.mark.parametrize("command", named("make", "pip"), ids=shown)
def test_targets_and_extras_exist(command: Command) -> None:
    if program(command) == "make":
        assert re.search(rf"^{command.words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
        return
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    [wanted] = re.findall(r"\.\[([\w,]+)\]", " ".join(command.words))
    assert set(wanted.split(",")) <= set(extras)


@pytest.mark.parametrize("command", named("python"), ids=shown)
def test_modules_exist_and_know_their_arguments(command: Command) -> None:
    flag, *arguments = command.words[1:]
    if flag.startswith("recipes/"):
        assert (ROOT / flag).is_file()
        return
    module, *arguments = arguments
    if flag == "-c":
        ast.parse(module)
        return
    assert flag == "-m"
    if module == "pytest":
        assert all((ROOT / word).exists() for word in arguments if "/" in word)
        return
    parts = module.split(".")
    # `benchmarks` finds its modules in every folder inside it.
    found = [ROOT.joinpath(*parts[:-1]), *ROOT.joinpath(*parts[:-1]).glob("*/")]
    files = [
        path for folder in found for path in (folder / f"{parts[-1]}.py", folder / parts[-1] / "__main__.py")
    ]
    text = next(path for path in files if path.is_file()).read_text(encoding="utf-8")
    names = [word.partition("=")[0] for word in arguments]
    assert all(f'"{name}"' in text or f" {name}=" in text for name in names)


@pytest.mark.parametrize("command", named("echo"), ids=shown)
def test_lines_of_files_are_json(command: Command) -> None:
    assert set(json.loads(command.words[1])) <= {"prompt", "prompt_ids", "messages", "id", "sampling"}
    assert command.words[2] == ">"


def table_names(text: str) -> list[str]:
    """Option names in the first column of tables; `x=a`, `b` or `c` is one option with its values."""
    cells = re.findall(r"^\| ([^|]*) \|", text, re.MULTILINE)
    return [name for cell in cells for name in NAME.findall(cell)[: 1 if " or " in cell else None]]


def is_key(name: str, help_text: str) -> bool:
    return re.search(rf"(?:^|, |    ){re.escape(name)}\b", help_text, re.MULTILINE) is not None


def test_options_in_the_text_exist(capsys: pytest.CaptureFixture[str]) -> None:
    pages = "".join((ROOT / page).read_text(encoding="utf-8") for page in PAGES)
    generate(["-h"])
    shown = capsys.readouterr().out
    wanted = {*GENERATE_OPTION.findall(pages)}
    options = (ROOT / "docs" / "generate.md").read_text(encoding="utf-8")
    _, engine, sampling = re.split(r"^\| (?:sampling )?option \|", options, flags=re.MULTILINE)
    wanted |= {*table_names(engine)} - {"decoder"}
    wanted |= {f"sampling.{name}" for name in table_names(sampling.partition("\n\n")[0])}
    assert len(wanted) > 30 and not sorted(name for name in wanted if not is_key(name, shown))
    bench = (ROOT / "docs" / "serve.md").read_text(encoding="utf-8").partition("| bench option |")[2]
    shown = {field.name for field in dataclasses.fields(BenchConfig)}
    assert {*table_names(bench.partition("\n\n")[0])} <= shown
    train = describe(TrainConfig)
    assert not sorted(name for name in {*TRAIN_OPTION.findall(pages)} if not is_key(name, train))
