"""Training a selector: its loss by hand, the rows that count, and whole runs on a model and on an adapter."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from idlm.checkpoint import verify
from idlm.config.compose import compose
from idlm.errors import UserError
from idlm.infer.engine import Engine
from idlm.selector import SELECTOR_FILE, PathWeights
from idlm.semantics import Semantics
from idlm.train.config.schema import TrainConfig
from idlm.train.selector import of_checkpoint, selector_loss, train_selector
from tests.adapters import write_adapter
from tests.integration.training.test_train_tiny import arguments
from tests.tiny_training import write_tiny_base

MASK_ID = 191


def _config(checkpoint: Path, output: Path, **changes: object) -> TrainConfig:
    more = {"train.steps": 3, "train.stages": "[{stride: 3, fraction: 1.0}]", "train.learning_rate": 0.05}
    return compose("train", TrainConfig, arguments(checkpoint, output, **(more | changes)))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_base(tmp_path_factory.mktemp("home") / "base")


@pytest.mark.parametrize("takes_overlap", [False, True])
def test_the_loss_is_its_definition(takes_overlap: bool) -> None:
    """Of 20 tokens 16 are candidates, whose scores take the place of their logits; the others keep theirs."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    weights = PathWeights(*(normal(*shape).requires_grad_() for shape in ((20, 4), (20, 4), (4, 6))))
    draft_MV, clean_MV, hidden_MD = normal(5, 20), normal(5, 20), normal(5, 6)
    previous_M = torch.tensor([3, 0, 19, 7, 7])
    labels_M = torch.tensor([*draft_MV[:4].argmax(-1).tolist(), int(draft_MV[4].argmin())])
    loss, sums = selector_loss(
        weights, [draft_MV, clean_MV], hidden_MD, (previous_M, labels_M), takes_overlap=takes_overlap
    )
    expected, num_among, overlap, plain = 0.0, 0, 0.0, 0.0
    for m in range(5):
        ids = draft_MV[m].topk(16).indices
        query_W = weights.previous_VW[previous_M[m]] * (weights.hidden_WD @ hidden_MD[m])
        changed_V = draft_MV[m].clone()
        changed_V[ids] += (weights.candidate_VW[ids] @ query_W).detach()
        q_V, p_V = changed_V.softmax(-1), clean_MV[m].softmax(-1)
        own = float(torch.minimum(q_V, p_V).sum())
        overlap, plain = overlap + own, plain + float(torch.minimum(draft_MV[m].softmax(-1), p_V).sum())
        num_among += bool((ids == labels_M[m]).any())
        expected += 1 - own if takes_overlap else -float(q_V[labels_M[m]].log())
    values = torch.tensor([5, num_among, expected, plain, overlap], dtype=torch.float64)
    torch.testing.assert_close(sums, values, atol=1e-5, rtol=1e-5)
    loss.backward()
    assert all(weight.grad is not None and weight.grad.any() for weight in weights)


def test_a_run_changes_the_selector_alone(base: Path, tmp_path: Path) -> None:
    """The acceptance before the first step is that of plain drafts, and grows from then on; the checkpoint is
    a copy, which the engine loads."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base)
    model.save_pretrained(tmp_path / "model")
    for path in base.glob("tokenizer*"):
        (tmp_path / "model" / path.name).write_bytes(path.read_bytes())
    Semantics(mask_token_id=MASK_ID, stride=3).save(tmp_path / "model")
    lines: list[str] = []
    config = _config(tmp_path / "model", tmp_path / "out", **{"train.steps": 8, "train.distill": "overlap"})
    module = train_selector(config, print_line=lines.append)
    verify(tmp_path / "out")
    assert Semantics.load(tmp_path / "out").selector == "path"
    stored = load_file(tmp_path / "out" / SELECTOR_FILE)
    assert torch.equal(stored["candidate_VW"], module.candidate_VW) and module.candidate_VW.any()
    weights = (tmp_path / name / "model.safetensors" for name in ("model", "out"))
    assert len({path.read_bytes() for path in weights}) == 1
    found = [line.split("acceptance ")[1].split(" -> ") for line in lines if line.startswith("step")]
    gains = [float(selected) - float(plain) for plain, selected in found]
    assert len(gains) == 8 and gains[0] == 0 < gains[-1]
    engine = Engine.from_pretrained(tmp_path / "out", "isd", device="cpu", max_length=64)
    assert engine.decoder.selector is not None
    assert len(engine.generate(["Tom has 4 books."])) == 1


def test_a_run_on_an_adapter_publishes_the_adapter(base: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter", base, mask_token_id=MASK_ID, stride=3)
    train_selector(_config(adapter, tmp_path / "out"), print_line=lambda line: None)
    verify(tmp_path / "out")
    found = Semantics.load(tmp_path / "out")
    assert found.selector == "path" and found.gated
    assert not (tmp_path / "out" / "model.safetensors").exists()
    engine = Engine.from_pretrained(tmp_path / "out", "isd", device="cpu", max_length=64)
    assert engine.decoder.selector is not None


def test_a_selector_reads_hidden_states_before_a_model_divides_them(base: Path, tmp_path: Path) -> None:
    """As the engine does: a divided head and a head of smaller weights train the same selector."""
    from transformers import AutoConfig, GraniteConfig, GraniteForCausalLM

    fields = AutoConfig.from_pretrained(base).to_dict() | {
        "model_type": "granite",
        "tie_word_embeddings": False,
    }
    fields.pop("architectures")
    stored = []
    for divisor in (1.0, 4.0):
        torch.manual_seed(0)
        model = GraniteForCausalLM(GraniteConfig(**fields | {"logits_scaling": divisor}))
        model.lm_head.weight.data *= divisor
        model.save_pretrained(path := tmp_path / str(divisor))
        for file in base.glob("tokenizer*"):
            (path / file.name).write_bytes(file.read_bytes())
        Semantics(mask_token_id=MASK_ID, stride=3).save(path)
        train_selector(_config(path, output := tmp_path / f"out{divisor}"), print_line=lambda line: None)
        stored.append(load_file(output / SELECTOR_FILE))
    assert stored[0]["candidate_VW"].any()
    torch.testing.assert_close(*stored)


def test_a_run_feeds_what_the_checkpoint_is_fed(base: Path, tmp_path: Path) -> None:
    """Random ids of the checkpoint's own range, in place of masks."""
    adapter = write_adapter(tmp_path / "adapter", base, mask_token_id=MASK_ID, stride=3)
    semantics = replace(Semantics.load(adapter), mask_token_id=None, noise_range=(3, 90))
    config = of_checkpoint(_config(adapter, tmp_path / "out"), adapter, semantics)
    assert (config.train.draft_input, config.train.noise_range) == ("uniform", [3, 90])
    semantics.save(adapter)
    train_selector(_config(adapter, tmp_path / "out"), print_line=lambda line: None)
    assert Semantics.load(tmp_path / "out") == replace(semantics, selector="path")


def test_a_checkpoint_without_masks_is_refused(base: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="IDLM-0521"):
        train_selector(_config(base, tmp_path / "out"), print_line=lambda line: None)
