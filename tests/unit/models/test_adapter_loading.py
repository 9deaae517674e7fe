"""Adapter directories: PEFT loads our exports; anything but a gated adapter of this base is refused."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from idlm.checkpoint import ADAPTER_CONFIG
from idlm.errors import UserError
from idlm.infer.engine import Engine
from idlm.infer.models import weights
from idlm.lora import MASK_ROW, MAX_RANK, WEIGHTS_FILE, AdapterSpec, base_identity
from idlm.semantics import Semantics
from idlm.train.checkpoint.base_files import BaseFiles
from idlm.train.checkpoint.export import export_adapter
from idlm.train.model.gated_lora import add_adapter, gate_of
from tests.adapters import write_adapter
from tests.toy import ARCHITECTURES, load_model, write_toy_checkpoint

MASK = 47
SPEC = AdapterSpec(rank=3, alpha=6.0)


@pytest.fixture(scope="module", params=ARCHITECTURES)
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_toy_checkpoint(tmp_path_factory.mktemp(request.param), architecture=request.param)


@pytest.fixture
def adapter(toy: Path, tmp_path: Path) -> Path:
    return write_adapter(tmp_path / "adapter", toy, mask_token_id=MASK, stride=3)


def trained(base: Path, *, mask_row: bool) -> Any:
    """A base and an adapter whose weights differ from their initial values."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(base).eval()
    generator = torch.Generator().manual_seed(3)
    row_D = torch.randn(model.config.hidden_size, generator=generator) if mask_row else None
    add_adapter(model, SPEC, mask_row_D=row_D)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model


def exported(model: Any, base: Path, target: Path, *, dtype: torch.dtype | None = None) -> Path:
    spec = AdapterSpec(rank=SPEC.rank, alpha=SPEC.alpha, base_path=str(base))
    semantics = Semantics(mask_token_id=MASK, stride=4, gated=True, base_identity=base_identity(base))
    export_adapter(model.state_dict(), None, semantics, spec, target, dtype=dtype, base=BaseFiles())
    return target


@pytest.mark.sweep_but("Llama-False")
@pytest.mark.sweep_but(base="Qwen2", mask_row=True)
@pytest.mark.parametrize("mask_row", [False, True])
def test_peft_loads_the_export_and_agrees_on_rows_that_are_all_masks(
    base: Path, tmp_path: Path, mask_row: bool
) -> None:
    """PEFT knows no gate, so that it computes what we do where every row is a MASK row. The embedding of MASK
    rows is not its business: it is handed to PEFT as an input embedding."""
    import transformers
    from peft import PeftModel

    model = trained(base, mask_row=mask_row)
    target = exported(model, base, tmp_path / "adapter")
    stock = transformers.AutoModelForCausalLM.from_pretrained(base)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        peft = PeftModel.from_pretrained(stock, target).eval()
    ids_BT = torch.full((2, 9), MASK)
    gate = gate_of(model)
    assert gate is not None
    gate.is_open = True
    stored = load_file(target / WEIGHTS_FILE)
    assert (MASK_ROW in stored) == mask_row
    row_D = stored.get(MASK_ROW, stock.get_input_embeddings().weight[MASK])
    with torch.no_grad():
        ours, theirs = model(ids_BT).logits, peft(inputs_embeds=row_D.expand(2, 9, -1)).logits
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
        gate.is_open = False
        assert (model(ids_BT).logits - ours).abs().max() > 0.1
        with peft.disable_adapter():
            assert torch.equal(model(ids_BT).logits, peft(ids_BT).logits)


def test_an_export_converts_its_dtype_and_can_be_repeated(toy: Path, tmp_path: Path) -> None:
    model = trained(toy, mask_row=True)
    for dtype in (None, torch.bfloat16):
        target = exported(model, toy, tmp_path / "adapter", dtype=dtype)
        stored = load_file(target / WEIGHTS_FILE)
        assert {value.dtype for value in stored.values()} == {dtype or torch.float32}
        load_model(target, device="cpu")
    assert AdapterSpec.load(target).targets == SPEC.targets


def refused(path: Path, code: str, *words: str, **options: Any) -> None:
    with pytest.raises(UserError) as caught:
        Engine.from_pretrained(path, device="cpu", **options)
    assert caught.value.code == code, caught.value
    for word in words:
        assert word in str(caught.value)


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_an_adapter_loads_and_a_subset_of_targets_too(toy: Path, adapter: Path, tmp_path: Path) -> None:
    assert Engine.from_pretrained(adapter, device="cpu").decoder.name == "isd"
    few = write_adapter(
        tmp_path / "few", toy, mask_token_id=MASK, stride=3, rank=5, targets=("v_proj", "up_proj")
    )
    trunk = load_model(few, device="cpu", dtype="bfloat16").trunk
    found = {name: low.matrices(0, 5) for name, low in trunk.layers[0].lora.items()}
    adapted = {
        name: [bool(b.any()) for b in b_Er.split(trunk.layers[0].lora[name].sizes)]
        for name, (_, b_Er) in found.items()
    }
    assert adapted["qkv"] == [False, False, True] and adapted["gate_up"] == [False, True]
    assert adapted["o"] == [False]
    assert found["qkv"][0][2].dtype == torch.bfloat16


def test_the_base_is_found_by_its_path_or_by_the_option(toy: Path, adapter: Path, tmp_path: Path) -> None:
    edit(adapter / ADAPTER_CONFIG, base_model_name_or_path=str(tmp_path / "gone"))
    refused(adapter, "IDLM-0611", "gone", "base=PATH")
    assert load_model(adapter, device="cpu", base=toy).directory == toy
    edit(adapter / ADAPTER_CONFIG, base_model_name_or_path=None)
    refused(adapter, "IDLM-0611", "nowhere")
    refused(adapter, "IDLM-0611", "empty", base=tmp_path / "empty")
    refused(toy, "IDLM-0611", "is not an adapter", base=toy)


def test_another_base_is_refused_by_name(adapter: Path, tmp_path: Path) -> None:
    """The same architecture and shapes with other weights."""
    other = write_toy_checkpoint(tmp_path / "other", seed=1)
    refused(adapter, "IDLM-0612", str(other), str(adapter), base=other)


def test_an_adapter_that_is_not_gated_is_refused(toy: Path, adapter: Path, tmp_path: Path) -> None:
    edit(adapter / "idlm_config.json", gated=False)
    refused(adapter, "IDLM-0609", "not gated", "merge_and_unload")
    (adapter / "idlm_config.json").unlink()
    refused(adapter, "IDLM-0609", "not gated")
    whole = write_toy_checkpoint(tmp_path / "whole")
    Semantics(mask_token_id=MASK, stride=3, gated=True, base_identity=base_identity(toy)).save(whole)
    refused(whole, "IDLM-0609", "whole model", "adapter_config.json")
    edit(whole / "idlm_config.json", base_identity=None)
    refused(whole, "IDLM-0304", "base_identity")


@pytest.mark.parametrize(
    "changes",
    [
        {"peft_type": "IA3"},
        {"r": 0},
        {"r": "8"},
        {"lora_alpha": None},
        {"target_modules": "all-linear"},
        {"target_modules": r".*\.(q|v)_proj"},
        {"use_dora": True},
        {"use_qalora": True},
        {"use_another_variant": True},
        {"layers_to_transform": 0},
        {"alpha_pattern": {"q_proj": 4}},
        {"init_lora_weights": "pissa_niter_4"},
        {"init_lora_weights": "OLoRA"},
        {"alora_invocation_tokens": [3]},
        {"kasa_config": {"beta": 1.0}},
        {"rank_pattern": {"q_proj": 4}},
        {"modules_to_save": ["lm_head"]},
        {"bias": "all"},
    ],
)
def test_variants_of_lora_are_refused_by_name(adapter: Path, changes: dict[str, Any]) -> None:
    edit(adapter / ADAPTER_CONFIG, **changes)
    [(name, value)] = changes.items()
    refused(adapter, "IDLM-0610", f"{name}={value!r}")


@pytest.mark.parametrize("init", [True, False, "gaussian", "eva", "orthogonal"])
def test_inits_that_leave_the_base_alone_are_taken(adapter: Path, init: bool | str) -> None:
    off = {"rank_pattern": {}, "modules_to_save": [], "layers_to_transform": None, "use_dora": False}
    edit(adapter / ADAPTER_CONFIG, init_lora_weights=init, **off)
    assert AdapterSpec.load(adapter).rank == SPEC.rank


def test_tensors_that_do_not_fit_are_refused_by_name(adapter: Path) -> None:
    edit(adapter / ADAPTER_CONFIG, r=4)
    refused(adapter, "IDLM-0613", "down_proj.lora_A.weight is [3, 64], in adapter_config.json [4, 64]")
    edit(adapter / ADAPTER_CONFIG, r=3, target_modules=["q_proj"])
    refused(adapter, "IDLM-0613", "24 not used", "down_proj.lora_A.weight")
    edit(adapter / ADAPTER_CONFIG, target_modules=[*SPEC.targets, "nope"])
    refused(adapter, "IDLM-0613", "target_modules names 1 that the base does not have: nope")
    edit(adapter / ADAPTER_CONFIG, target_modules=list(SPEC.targets))
    stored = load_file(adapter / WEIGHTS_FILE)
    lost = next(name for name in stored if "layers.1.mlp.up_proj.lora_B" in name)
    del stored[lost]
    stored[MASK_ROW] = torch.zeros(31)
    save_file(stored, adapter / WEIGHTS_FILE)
    refused(adapter, "IDLM-0613", f"1 missing: {lost}", f"{MASK_ROW} is [31]")
    (adapter / WEIGHTS_FILE).write_bytes(b"short")
    refused(adapter, "IDLM-0607", WEIGHTS_FILE)


def test_a_rank_is_compared_with_the_stored_tensors_before_it_is_allocated(
    adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    edit(adapter / ADAPTER_CONFIG, r=MAX_RANK)
    monkeypatch.setattr(weights, "copy", lambda targets, files: pytest.fail("weights of the base are read"))
    refused(adapter, "IDLM-0613", f"is [3, 64], in adapter_config.json [{MAX_RANK}, 64]")


def test_a_mask_id_outside_the_base_needs_a_row_of_its_own(toy: Path, tmp_path: Path) -> None:
    settings = {"mask_token_id": 48, "stride": 3}
    refused(write_adapter(tmp_path / "without", toy, **settings), "IDLM-0606", "mask_token_id=48")
    load_model(write_adapter(tmp_path / "with", toy, has_mask_row=True, **settings), device="cpu")


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_an_adapter_that_is_not_finite_is_refused(adapter: Path, value: str, tmp_path: Path) -> None:
    shutil.copytree(adapter, tmp_path / "bad")
    tensors = load_file(tmp_path / "bad" / WEIGHTS_FILE)
    name = sorted(tensors)[-1]
    tensors[name].view(-1)[-1] = float(value)
    save_file(tensors, tmp_path / "bad" / WEIGHTS_FILE)
    refused(tmp_path / "bad", "IDLM-0613", "not finite", name)
    shutil.copytree(adapter, tmp_path / "alpha")
    edit(tmp_path / "alpha" / ADAPTER_CONFIG, lora_alpha=float(value))
    refused(tmp_path / "alpha", "IDLM-0610", "lora_alpha")


def test_a_mask_row_that_is_not_finite_is_refused_where_it_is_used(toy: Path, tmp_path: Path) -> None:
    shutil.copytree(toy, tmp_path / "bad")
    path = tmp_path / "bad" / "model.safetensors"
    tensors = load_file(path)
    tensors["model.embed_tokens.weight"][MASK] = float("nan")
    save_file(tensors, path, metadata={"format": "pt"})
    refused(tmp_path / "bad", "IDLM-0606", "not finite", decoder="isd", mask_token_id=MASK, stride=3)
    Engine.from_pretrained(tmp_path / "bad", "ar", device="cpu", mask_token_id=MASK)
