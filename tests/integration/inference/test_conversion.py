"""What a conversion changed: clean rows against a plain computation, and the reports of both commands."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from idlm.config.compose import compose
from idlm.infer.cli.config import EngineArguments
from idlm.infer.evaluation import conversion
from idlm.infer.evaluation.conversion import (
    CleanRows,
    Conversion,
    Shift,
    clean_rows,
    measure_conversion,
    shifts,
)
from idlm.infer.evaluation.evaluate import run_evaluation
from idlm.infer.models.loader import load_outline, read_outline
from idlm.semantics import Semantics
from idlm.train import sampler
from idlm.train.config.schema import TrainConfig
from idlm.train.report import SampleReport, write_report
from tests.adapters import write_adapter
from tests.errors import refused
from tests.integration.inference.command_lines import SPARE_ROW, TINY

ANSWERS = [
    ([*range(5 + start), *range(40, 60 + start)], range(5 + start, 25 + 2 * start)) for start in range(3)
]
IDLM = TINY.with_name("tiny_idlm")
SETTINGS = {"device": "cpu", "dtype": "float32", "max_num_seqs": 4, "max_length": 160}


def rows_of(path: Path) -> CleanRows:
    return clean_rows(load_outline(read_outline(path, dtype="float32"), device="cpu"), ANSWERS)


@pytest.fixture(scope="module")
def changed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled base with another weight of its first layer."""
    folder = Path(shutil.copytree(TINY, tmp_path_factory.mktemp("changed") / "model"))
    (folder / "manifest.json").unlink(missing_ok=True)
    weights = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.weight"
    noise = torch.randn(weights[name].shape, generator=torch.Generator().manual_seed(1))
    weights[name] = weights[name] + (0.05 * noise).to(weights[name].dtype)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_a_model_is_its_own_base() -> None:
    classes = ["letters", "digits"] * 32
    found = shifts(rows_of(TINY), rows_of(TINY), classes[: sum(len(scored) for _, scored in ANSWERS)])
    assert [each.name for each in found] == ["all", "letters", "digits"]
    assert all(each.kl == 0 and each.agreement == 1 and each.entropy > 0 for each in found)


def test_changed_weights_have_the_divergence_of_a_plain_computation(changed: Path) -> None:
    models = [AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in (TINY, changed)]
    kl, same, entropy = [], [], []
    for token_ids, scored in ANSWERS:
        laws = [model(torch.tensor([token_ids])).logits[0].double().softmax(-1) for model in models]
        for at in scored:
            p, q = (law[at - 1] for law in laws)
            kl.append(sum((p * (p / q).log()).tolist()))
            same.append(int(p.argmax()) == int(q.argmax()))
            entropy.append(-sum((p * p.log()).tolist()))
    [found] = shifts(rows_of(TINY), rows_of(changed), ["nothing"] * len(kl))
    assert found.num_tokens == len(kl) == 63
    assert found.kl == pytest.approx(sum(kl) / len(kl), rel=1e-3) and found.kl > 0.05
    assert found.agreement == pytest.approx(sum(same) / len(same)) and 0 < found.agreement < 1
    assert found.entropy == pytest.approx(sum(entropy) / len(entropy), rel=1e-3)


@pytest.mark.parametrize(
    ("family", "own"),
    [
        ("Gemma3ForCausalLM", {"query_pre_attn_scalar": 17, "sliding_window": 7, "head_dim": 10}),
        ("GraniteForCausalLM", {"attention_multiplier": 0.21, "logits_scaling": 1.9}),
    ],
)
def test_rows_of_families_that_scale_scores_and_logits_or_see_windows(
    family: str, own: dict[str, Any], tmp_path: Path
) -> None:
    sizes = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0}
    theirs = getattr(transformers, family)
    torch.manual_seed(0)
    reference = theirs(theirs.config_class(**sizes, **heads, **own, initializer_range=0.3)).eval()
    reference.save_pretrained(tmp_path)
    rows_ID, head = rows_of(tmp_path)
    with torch.no_grad():
        logits = [reference(torch.tensor([token_ids])).logits[0] for token_ids, _ in ANSWERS]
    expected = [each[[at - 1 for at in scored]] for each, (_, scored) in zip(logits, ANSWERS, strict=True)]
    torch.testing.assert_close(head(rows_ID), torch.cat(expected), atol=1e-4, rtol=1e-4)


def compared(own: Path, monkeypatch: pytest.MonkeyPatch, base: Path = TINY) -> Conversion | None:
    monkeypatch.setattr(conversion, "TIMED_TOKENS", 6)
    arguments = EngineArguments(model=str(own), decoder=None, settings=SETTINGS, options={})
    first = dataclasses.replace(arguments, model=str(base), decoder="ar")
    return measure_conversion(first, arguments, ANSWERS, origin="X", max_tokens=12)


def test_clean_rows_of_a_gated_adapter_are_exactly_those_of_the_base(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = write_adapter(tmp_path / "adapter", TINY, mask_token_id=SPARE_ROW, stride=3)
    found = compared(adapter, monkeypatch)
    assert found is not None and found.is_gated
    assert all(each.kl == 0 and each.agreement == 1 for each in found.shifts)
    assert [each.name for each in found.shifts] == ["all", "letters"]
    assert "exactly 0, checked" in found.text() and "Warning" not in found.text()
    assert [(temperature, len(rates)) for temperature, rates, _ in found.drafts] == [(0, 2), (1, 2)]
    assert found.base_ms > 0 and found.own_ms > 0


def test_what_has_no_drafts_or_no_clean_rows_is_not_measured_as_if_it_had(
    changed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = compared(changed, monkeypatch)
    assert found is not None and not found.drafts and "drafts" not in found.text()
    assert "Warning" in found.text() and "train.learning_rate" in found.text()
    block = Path(shutil.copytree(changed, tmp_path / "block"))
    Semantics(causality="block", block_size=4, mask_token_id=SPARE_ROW).save(block)
    assert compared(block, monkeypatch) is None
    unanswered = ([1, 2, 3], [])
    arguments = EngineArguments(model=str(TINY), decoder="ar", settings=SETTINGS, options={})
    refused("IDLM-0484", measure_conversion, arguments, arguments, [unanswered], origin="X", max_tokens=12)


def test_the_text_warns_beyond_either_bound_and_predicts_by_eq_3(tmp_path: Path) -> None:
    shift = Shift(name="all", num_tokens=1000, kl=0.02, agreement=0.95, entropy=1.0)
    found = Conversion(
        base="b", origin="X", is_gated=False, shifts=(shift,), decoder="isd", base_ms=12, own_ms=20,
        drafts=((0.0, (0.8, 0.5), 1.9),),
    )  # fmt: skip
    text = found.text()
    assert "within the bounds" in text and "| all | 1,000 | 0.0200 | 95.0% | 1.00 |" in text
    # (2 + 0.8) / (2 - 0.4) tokens a pass, and 12 ms over 20 ms.
    assert "| 0 | 0.80 | 0.50 | 1.75 | 1.90 | 1.05 |" in text
    for moved in ({"kl": 0.031}, {"agreement": 0.92}):
        assert "Warning" in dataclasses.replace(found, shifts=(shift._replace(**moved),)).text()
    samples = SampleReport(conversion=found)
    report = write_report(tmp_path, [], {}, samples).read_text()
    assert "What its drafts gain" in report and "](report/conversion.svg)" in report
    assert (tmp_path / "report" / "conversion.svg").read_text().startswith("<?xml")


@pytest.mark.sweep
def test_eval_compares_with_a_base(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(conversion, "TIMED_TOKENS", 6)
    words = [f"model={IDLM}", "device=cpu", "num=2", "sampling.max_tokens=12", "baseline=null"]
    assert run_evaluation([*words, f"compare={TINY}", "sampling.n=2"]) == 0
    shown = capsys.readouterr().out
    assert f"{TINY} - isd: " in shown and "What the conversion changed" in shown
    assert "on 48 tokens of its own answers to ledger at temperature 1" in shown
    assert "expected speed-up" in shown
    refused("IDLM-0600", run_evaluation, [*words, f"compare={tmp_path / 'nothing'}"])


@pytest.mark.sweep
def test_training_reports_what_it_changed_on_held_out_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversion, "TIMED_TOKENS", 6)
    monkeypatch.setattr(conversion, "MAX_ANSWERS", 2)
    monkeypatch.setattr(sampler, "SAMPLE_TOKENS", 12)
    config = compose("train", TrainConfig, ["recipe=tiny", f"model.path={TINY}", f"output_dir={IDLM}"])
    found = sampler.engine_sampler(config)(IDLM, 1).conversion
    assert found.origin == "answers to held-out prompts" and found.shifts[0].num_tokens > 100
    assert len(found.drafts[0][1]) == Semantics.load(IDLM).stride - 1
    assert sampler.engine_sampler(dataclasses.replace(config, output_dir="."))(IDLM, 1).conversion is None
