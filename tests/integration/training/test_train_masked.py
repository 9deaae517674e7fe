"""`objective=block` and `objective=full` by the commands a user types: train, stop, export, refusals, and
answers of a full-diffusion checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from idlm.checkpoint import verify
from idlm.errors import UserError
from idlm.infer.cli.generate import generate
from idlm.infer.engine import Engine
from idlm.infer.evaluation.evaluate import run_evaluation
from idlm.semantics import Semantics
from idlm.train import cli
from tests.errors import refused
from tests.integration.training.stopped_runs import assert_same_weights, train_with_a_stop

BASE = Path(__file__).parents[3] / "recipes/assets/tiny_ar"
PROMPT = "Mia has 5 nuts. Mia breaks 2. How many nuts does Mia have?"


def arguments(recipe: str, output: Path, **changes: object) -> list[str]:
    values = {
        "output_dir": output,
        "model.path": BASE,
        "train.batch_size": 1,
        "train.device": "cpu",
        "train.workers": 0,
        "train.threads": 1,
        "train.log_every": 1,
        "train.save_every": 100,
        "report.enabled": "false",
    }
    own: dict[str, object] = {"train.steps": 3, "train.max_padding": 20, "train.row_length": 340}
    if recipe == "tiny_block":
        stages = "[{stride: 2, steps: 1}, {stride: 4, steps: 3}]"
        own = {"train.stages": stages, "train.steps": "null", "train.row_length": 610}
        own |= {"eval.every": 3, "eval.num_items": 1}
    return [f"recipe={recipe}", *(f"{key}={value}" for key, value in (values | own | changes).items())]


def metrics_of(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "run" / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("full") / "whole"
    assert cli.main(arguments("tiny_full", output)) == 0
    return output


def test_a_run_on_canvases_resumes_bitwise_and_exports_what_it_means(trained: Path, tmp_path: Path) -> None:
    stopped = tmp_path / "stopped"
    train_with_a_stop(arguments("tiny_full", stopped), after=1)
    assert_same_weights(trained / "model.safetensors", stopped / "model.safetensors")
    verify(trained)
    assert Semantics.load(trained) == Semantics(
        causality="full", logit_shift=False, mask_token_id=165, stop_token_ids=(2,)
    )
    lines = metrics_of(trained)
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert all(0 < line["num_tokens"] <= 340 and line["tokens_per_second"] > 0 for line in lines)


def test_a_run_on_blocks_resumes_bitwise_and_exports_what_it_means(tmp_path: Path) -> None:
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    assert cli.main(arguments("tiny_block", whole)) == 0
    train_with_a_stop(arguments("tiny_block", stopped), after=2)
    losses, again = (
        [(one["step"], one["mask_loss"], one["acceptance"]) for one in metrics_of(output)]
        for output in (whole, stopped)
    )
    assert losses == again and not any(acceptance for *_, acceptance in losses)
    assert_same_weights(whole / "model.safetensors", stopped / "model.safetensors")
    for directory, block_size in ((whole / "stages" / "1-stride-2", 2), (whole, 4)):
        verify(directory)
        semantics = Semantics.load(directory)
        assert (semantics.causality, semantics.logit_shift) == ("block", False)
        assert semantics.block_size == semantics.stride == block_size
        assert (semantics.mask_token_id, semantics.stop_token_ids) == (165, (2,))


@pytest.mark.sweep
@pytest.mark.parametrize(("recipe", "shown"), [("tiny_full", "canvas:"), ("tiny_block", "stride 4")])
def test_a_dry_run_marks_the_targets(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], recipe: str, shown: str
) -> None:
    assert cli.main([*arguments(recipe, tmp_path / "out"), "dry_run=true"]) == 0
    out = capsys.readouterr().out
    assert shown in out and "[[" in out and "<eos>]]" in out


REFUSED: list[tuple[str, dict[str, object], tuple[str, ...]]] = [
    (
        "tiny_full",
        {"train.stages": "[{stride: 4, steps: 2}]", "adapter": "{rank: 4}", "train.max_padding": -1},
        ("has no strides", "takes no gated adapter", "train.max_padding=-1 must be at least 0"),
    ),
    ("tiny_full", {"objective": "ar"}, ("the objective does not pad answers",)),
    (
        "tiny_block",
        {"train.stages": "[{stride: 4, steps: 2, clean_weight: auto}]", "adapter": "{rank: 4}"},
        ("has no clean loss", "takes no gated adapter"),
    ),
]


@pytest.mark.parametrize(("recipe", "wrong", "expected"), REFUSED, ids=str)
def test_what_an_objective_has_not_is_refused(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    recipe: str,
    wrong: dict[str, object],
    expected: tuple[str, ...],
) -> None:
    assert cli.main(arguments(recipe, tmp_path / "out", **wrong)) == 2
    shown = " ".join(capsys.readouterr().err.split())
    assert all(part in shown for part in expected), shown


def test_a_canvas_has_128_places_unless_told(trained: Path) -> None:
    engine = Engine.from_pretrained(trained, device="cpu", steps=1, max_length=150)
    assert engine.decoder.name == "full"
    [answer] = engine.generate([PROMPT])
    assert answer.finish_reason == "stop" or len(answer.token_ids) == 128
    assert answer.num_forwards == 1
    short = Engine.from_pretrained(trained, device="cpu", steps=1, block_length=32, max_length=100)
    refused(r"IDLM-0470.*max_tokens=128.*\n?.*use max_tokens=64", short.generate, [PROMPT])


def test_files_name_the_line_whose_canvas_does_not_fit(trained: Path, tmp_path: Path) -> None:
    lines = [
        {"prompt": PROMPT, "sampling": {"max_tokens": 8}},
        {"prompt": "Hi", "sampling": {"max_tokens": 6}},
    ]
    source = tmp_path / "prompts.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    given = [f"model={trained}", f"input={source}", f"output={tmp_path / 'out.jsonl'}", "device=cpu"]
    refused(r"IDLM-0470.*prompts\.jsonl:2: max_tokens=6", generate, [*given, "decoder.block_length=4"])
    assert generate([*given, "decoder.block_length=2", "decoder.threshold=0.5", "stats=false"]) == 0
    answers = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [1 <= len(answer["token_ids"]) <= size for answer, size in zip(answers, (8, 6), strict=True)]


def test_the_baseline_keeps_order_and_blocks(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = [f"model={trained}", "num=2", "device=cpu", "sampling.temperature=0", "sampling.max_tokens=8"]
    given += ["decoder.block_length=4", "decoder.order=maskgit_plus"]
    assert run_evaluation([*given, "decoder.threshold=0"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    baseline, judged = (next(line for line in lines if line[:1] == [name]) for name in ("full:one", "full"))
    assert float(judged[-2]) > 2 >= float(baseline[-2])
    assert run_evaluation(given) == 0
    assert "is the decoder itself" in capsys.readouterr().err


def test_other_decoders_refuse_it_and_say_what_to_do(trained: Path) -> None:
    with pytest.raises(UserError, match=r"IDLM-045[02]") as caught:
        generate([f"model={trained}", "-p", PROMPT, "decoder=isd", "device=cpu"])
    assert "leave the decoder out" in str(caught.value)
