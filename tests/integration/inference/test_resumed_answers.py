"""`resume=true`: one file holds the answers of one model, decoder and sampling, and failures are repeated."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from idlm.contracts import SamplingParams
from idlm.errors import UserError
from idlm.infer.cli.generate import generate
from idlm.infer.cli.resume import EXCLUDED_KEYS, SPEED_ONLY_KEYS, difference, model_digest, of_request
from idlm.infer.engine import Engine
from idlm.infer.runtime.model_runner import StepResult
from idlm.infer.runtime.worker import Worker
from idlm.infer.settings import EngineSettings
from idlm.infer.state.batch import Schedule
from idlm.lora import AdapterSpec
from tests.errors import refused
from tests.integration.inference.command_lines import (
    BASE,
    PROMPTS,
    SHORT,
    TINY,
    answer,
    interrupt_after,
    read_lines,
    write_lines,
)

SETTINGS: dict[str, Any] = {"stop": ["q"], "top_k": 4, "logit_bias": {"5": -100}}


@pytest.fixture
def stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], Path]:
    """`input=` and `output=` of a run that was stopped, and the partial file it left."""
    source = write_lines(tmp_path / "in.jsonl", [{"prompt": prompt} for prompt in PROMPTS])
    options = [f"input={source}", f"output={tmp_path / 'out'}"]
    with monkeypatch.context() as patch:
        interrupt_after(patch, SHORT + 1)
        with pytest.raises(KeyboardInterrupt):
            generate([*BASE, *options])
    partial = tmp_path / "out.partial"
    assert [record["request_id"] for record in read_lines(partial)] == ["1", "2"]
    return options, partial


def _retrained(directory: Path) -> Path:
    """A copy of the model, one tensor of which is another."""
    copy = Path(shutil.copytree(TINY, directory))
    tensors = load_file(copy / "model.safetensors")
    name = sorted(tensors)[-1]
    tensors[name] = tensors[name] + 1
    (copy / "model.safetensors").unlink()
    (copy / "manifest.json").unlink()
    save_file(tensors, copy / "model.safetensors")
    return copy


@pytest.mark.sweep_but(words="sampling.temperature=0.5")
@pytest.mark.sweep_but(words="decoder='isd'")
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (["sampling.temperature=0.5"], "sampling.temperature=0.5"),
        (["sampling.seed=1"], "the default of sampling.seed, and this run has sampling.seed=1"),
        (["decoder=isd", "mask_token_id=170"], "decoder='isd'"),
        (["dtype=float64"], "dtype='float64'"),
        (["weights=fp8"], "weights='fp8'"),
        (["accelerators=[mage]", "accelerators.mage.k=9"], "accelerators={'mage': {'k': 9}}"),
    ],
)
def test_answers_of_other_settings_are_refused(
    stopped: tuple[list[str], Path], monkeypatch: pytest.MonkeyPatch, change: list[str], words: str
) -> None:
    """Before a model is loaded, by the first difference, and the file stays as it was."""
    options, partial = stopped
    before = partial.read_bytes()
    monkeypatch.setattr(Engine, "from_pretrained", lambda *_, **__: pytest.fail("a model is loaded"))
    error = refused("IDLM-0463", generate, [*BASE, *options, "resume=true", *change])
    assert words in error.message and "in.jsonl:1" in error.message
    assert "another output=" in error.fix and str(partial) in error.fix
    assert partial.read_bytes() == before


def test_another_model_is_refused_and_a_moved_one_is_not(
    tmp_path: Path, stopped: tuple[list[str], Path]
) -> None:
    options, _ = stopped
    other = _retrained(tmp_path / "other")
    with pytest.raises(UserError, match=r"IDLM-0463.*tiny_ar \(model_digest .*other \(model_digest"):
        generate([*BASE, *options, "resume=true", f"model={other}"])
    moved = shutil.copytree(TINY, tmp_path / "moved")
    assert generate([*BASE, *options, "resume=true", f"model={moved}"]) == 0
    refused("IDLM-0463", generate, [*BASE, *options, "resume=true", f"model={other}"])


def test_files_that_do_not_affect_answers_may_change(tmp_path: Path) -> None:
    model = Path(shutil.copytree(TINY, tmp_path / "model"))
    before = model_digest(str(model))
    for name in ("answers.json", "eval_results.json", "trainer_state.json", "README.md", "notes.jinja"):
        (model / name).write_text("{}")
    assert model_digest(str(model)) == before


@pytest.mark.parametrize(
    "name",
    [
        *("config.json", "idlm_config.json", "tokenizer.json", "vocab.txt", "spiece.model"),
        *("chat_template.jinja", "additional_chat_templates/tool.jinja"),
    ],
)
def test_every_file_that_affects_answers_counts(tmp_path: Path, name: str) -> None:
    model = Path(shutil.copytree(TINY, tmp_path / "model"))
    before = model_digest(str(model))
    (model / name).parent.mkdir(exist_ok=True)
    with (model / name).open("a") as file:
        file.write(" ")
    assert model_digest(str(model)) != before


@pytest.mark.parametrize(("name", "is_given"), [("config.json", True), ("tokenizer.json", False)])
def test_files_of_the_base_of_an_adapter_count_too(tmp_path: Path, name: str, is_given: bool) -> None:
    base, adapter = Path(shutil.copytree(TINY, tmp_path / "base")), tmp_path / "adapter"
    adapter.mkdir()
    AdapterSpec(rank=1, alpha=1.0, base_path="/gone" if is_given else str(base)).save(adapter)
    (adapter / "adapter_model.safetensors").write_bytes(b"weights")
    given = str(base) if is_given else None
    before = model_digest(str(adapter), base=given)
    assert model_digest(str(adapter), base=str(shutil.copytree(base, tmp_path / "moved"))) == before
    with (base / name).open("a") as file:
        file.write(" ")
    assert model_digest(str(adapter), base=given) != before


def test_where_and_how_fast_it_runs_may_change(stopped: tuple[list[str], Path], tmp_path: Path) -> None:
    options, _ = stopped
    speed = ["max_num_seqs=3", "page_size=8", "num_pages=64", "graphs=on", "prefix_cache=false"]
    assert generate([*BASE, *options, "resume=true", *speed, "num_inflight_steps=1", "attention=torch"]) == 0
    texts = [record["text"] for record in read_lines(tmp_path / "out")]
    assert texts == [answer(prompt).text for prompt in PROMPTS]


def test_every_setting_is_compared_or_listed_as_irrelevant() -> None:
    fields = set(EngineSettings.__dataclass_fields__)
    assert set(SPEED_ONLY_KEYS) | set(EXCLUDED_KEYS) <= fields
    assert fields - set(SPEED_ONLY_KEYS) - set(EXCLUDED_KEYS) == {
        *("dtype", "mask_token_id", "max_length", "weights", "kv_cache", "chat_template"),
        *("rope", "rope_factor"),
    }


def test_a_record_holds_its_run_config(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in", [{"prompt": PROMPTS[0], "sampling": SETTINGS}])
    assert generate([*BASE, "max_length=100", f"input={source}", f"output={tmp_path / 'out'}"]) == 0
    [record] = read_lines(tmp_path / "out")
    assert record["run_config"] == {
        "model": str(TINY),
        "model_digest": model_digest(str(TINY)),
        "decoder": "ar",
        "dtype": "float32",
        "max_length": 100,
        "sampling.temperature": 0,
        "sampling.max_tokens": SHORT,
        "sampling.ignore_eos": True,
        "sampling.stop": ["q"],
        "sampling.top_k": 4,
        "sampling.logit_bias": {"5": -100},
    }
    same = {**record["run_config"], **of_request({}, SamplingParams(**SETTINGS))}
    assert difference(record["run_config"], same) is None
    assert all(f"sampling.{name}" not in record["run_config"] for name in ("seed", "n", "tau"))
    assert SamplingParams().max_tokens != SHORT


def _failing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine gives up the first of the two requests that run at first."""
    launch, num_passes = Worker.launch, 0

    def launching(worker: Worker, schedule: Schedule) -> StepResult:
        nonlocal num_passes
        num_passes += 1
        if num_passes <= 2:
            raise torch.OutOfMemoryError("injected")
        return launch(worker, schedule)

    monkeypatch.setattr(Worker, "launch", launching)


def _as_partial(output: Path) -> None:
    output.rename(f"{output}.partial")


@pytest.mark.sweep_but("partial")
@pytest.mark.parametrize("put", [_as_partial, lambda output: None], ids=["partial", "published"])
def test_what_failed_is_answered_again(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    put: Callable[[Path], None],
) -> None:
    source = write_lines(tmp_path / "in.jsonl", [{"prompt": prompt} for prompt in PROMPTS[:4]])
    output = tmp_path / "out"
    arguments = [*BASE, f"input={source}", f"output={output}", "resume=true"]
    expected = [answer(prompt).text for prompt in PROMPTS[:4]]
    with monkeypatch.context() as patch:
        _failing(patch)
        assert generate(arguments) == 1
    [options] = [at for at, record in enumerate(read_lines(output)) if record["error"] is not None]
    assert options < 3, "no record follows the failure"
    put(output)
    capsys.readouterr()
    with monkeypatch.context() as patch:
        _failing(patch)
        assert generate(arguments) == 1, "it has failed again"
    assert "3 answers are in" in capsys.readouterr().err
    assert sum(record["error"] is not None for record in read_lines(output)) == 1
    put(output)
    assert generate(arguments) == 0
    records = read_lines(output)
    kept = [number for number in range(4) if number != options]
    assert [int(record["request_id"]) - 1 for record in records] == [*kept, options]
    assert [record["text"] for record in records] == [expected[number] for number in (*kept, options)]
    assert all(record["error"] is None for record in records)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out"]
    capsys.readouterr()
    assert generate(arguments) == 0
    assert "is complete" in capsys.readouterr().err


def test_a_finished_file_stays_until_the_better_one_is_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stopped repair continues from its own partial file, not from the file with the failure."""
    source = write_lines(tmp_path / "in.jsonl", [{"prompt": prompt} for prompt in PROMPTS[:4]])
    output, partial = tmp_path / "out", tmp_path / "out.partial"
    arguments = [*BASE, f"input={source}", f"output={output}"]
    assert generate(arguments) == 0
    records = read_lines(output)
    for number in (0, 2):
        records[number] |= {"error": "IDLM-0448: memory", "finish_reason": "error", "text": ""}
    write_lines(output, records)
    before = output.read_bytes()
    with monkeypatch.context() as patch:
        interrupt_after(patch, SHORT - 2)
        with pytest.raises(KeyboardInterrupt):
            generate([*arguments, "resume=true"])
    assert output.read_bytes() == before
    assert [record["request_id"] for record in read_lines(partial)] == ["2", "4"]
    kept = [{**record, "text": f"{record['text']}!"} for record in read_lines(partial)]
    write_lines(partial, kept)
    assert generate([*arguments, "resume=true"]) == 0
    texts = [answer(PROMPTS[number]).text for number in (0, 2)]
    assert [r["text"] for r in read_lines(output)] == [*(r["text"] for r in kept), *texts]


def test_a_finished_file_may_have_blank_lines_and_a_broken_one_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_lines(tmp_path / "in.jsonl", [{"prompt": prompt} for prompt in PROMPTS[:3]])
    output = tmp_path / "out"
    arguments = [*BASE, f"input={source}", f"output={output}", "resume=true"]
    assert generate(arguments) == 0
    first, second, third = output.read_text().splitlines()
    output.write_text(f"{first}\n\n{second}\n{third}\n\n")
    capsys.readouterr()
    assert generate(arguments) == 0
    assert "is complete" in capsys.readouterr().err
    output.write_text(f"{first}\n{second[:-9]}\n{third}\n")
    refused(f"IDLM-0446.* there is no record at {output}:2", generate, arguments)
    _as_partial(output)
    assert generate(arguments) == 0
    assert f"without a whole record: {output}.partial:2" in capsys.readouterr().err
    assert [record["request_id"] for record in read_lines(output)] == list("132")
