"""Importing LoRAs of others: what their config does not say, what of them is checked, and that they run."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from idlm.checkpoint import verify
from idlm.files.paths import POINTER
from idlm.infer.cli import import_adapter as command
from idlm.infer.cli.import_adapter import PRESETS, ImportConfig, main
from idlm.infer.engine import Engine
from idlm.lora import PROJECTIONS, WEIGHTS_FILE, AdapterSpec, base_identity
from idlm.publish import publish
from idlm.selector import check_selector
from idlm.semantics import Semantics
from tests.adapters import add_selector, write_adapter
from tests.contracts.engines import answers, greedy, prompts_of
from tests.small_tokenizers import save_byte_level
from tests.toy import write_spelling_toy, write_toy_checkpoint

PEFT: dict[str, Any] = {
    "alpha_pattern": {}, "auto_mapping": None,
    "base_model_name_or_path": "s-sahoo/uno-qwen3-8B",     "bias": "none", "corda_config": None,
    "eva_config": None, "exclude_modules": None, "fan_in_fan_out": False,     "inference_mode": True,
    "init_lora_weights": True, "layer_replication": None,
    "layers_pattern": None,     "layers_to_transform": None, "loftq_config": {}, "lora_alpha": 48,
    "lora_bias": False,     "lora_dropout": 0.0, "megatron_config": None, "megatron_core": "megatron.core",
    "modules_to_save": None, "peft_type": "LORA",     "r": 3, "rank_pattern": {}, "revision": "b8a7577b",
    "target_modules": sorted(PROJECTIONS),     "task_type": "CAUSAL_LM", "trainable_token_indices": None,
    "use_dora": False, "use_rslora": False,
}  # fmt: skip
"""An adapter_config.json as PEFT writes it."""
UNIFORM = ["gated=true", "stride=16", "noise_range=[1,47]", "acceptance=[0.8,0.7]"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_toy_checkpoint(tmp_path_factory.mktemp("base"))


@pytest.fixture
def foreign(base: Path, tmp_path: Path) -> Path:
    """An adapter as others publish it: in a folder below, without a file of ours."""
    folder = write_adapter(tmp_path / "bundle" / "adapter", base, mask_token_id=None, stride=1)
    (folder / "idlm_config.json").unlink()
    (folder / "adapter_config.json").write_text(json.dumps(PEFT))
    return tmp_path / "bundle"


def run(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    status = command.command.run(command.import_adapter, arguments)
    shown = capsys.readouterr()
    return status, shown.out + shown.err


@pytest.mark.parametrize("kind", ["below", "root", "bin", "shards"])
def test_an_imported_adapter_answers_as_its_base(
    foreign: Path, base: Path, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = foreign / "adapter"
    tensors = load_file(folder / WEIGHTS_FILE)
    if kind == "bin":
        (folder / WEIGHTS_FILE).unlink()
        torch.save(tensors, folder / "adapter_model.bin")
    if kind == "shards":
        (folder / WEIGHTS_FILE).unlink()
        for number, name in enumerate(sorted(tensors)):
            part = folder / f"adapter_model-{number:05}.safetensors"
            save_file({name: tensors[name]}, part)
    given = folder if kind == "root" else foreign
    output = tmp_path / "out"
    status, shown = run([f"model={given}", f"base={base}", f"output_dir={output}", *UNIFORM], capsys)
    assert status == 0, shown
    assert "rank 3, alpha 48" in shown and "random ids in [1, 47), stride 16" in shown
    assert "names s-sahoo/uno-qwen3-8B" in shown
    verify(output)
    semantics = Semantics.load(output)
    assert (semantics.gated, semantics.stride, semantics.noise_range) == (True, 16, (1, 47))
    assert semantics.acceptance == (0.8, 0.7)
    assert AdapterSpec.load(output).scaling == 16
    assert load_file(output / WEIGHTS_FILE).keys() == tensors.keys()
    prompts = prompts_of([1, 9, 5])
    expected = Engine.from_pretrained(base, "ar", device="cpu").generate(prompts, greedy(max_tokens=8))
    engine = Engine.from_pretrained(output, base=base, stride=4, device="cpu")
    assert engine.decoder.name == "isd"
    assert answers(engine.generate(prompts, greedy(max_tokens=8))) == answers(expected)


def test_the_base_may_be_the_bundle_itself_or_be_named(
    foreign: Path, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(base, foreign, dirs_exist_ok=True)
    mask = ["gated=true", "stride=3", "mask_token_id=40"]
    assert run([f"model={foreign}", f"output_dir={tmp_path / 'a'}", *mask], capsys)[0] == 0
    assert AdapterSpec.load(tmp_path / "a").base_path == str(foreign.resolve())
    assert Semantics.load(tmp_path / "a").draft_input == "mask"
    other = write_toy_checkpoint(tmp_path / "other", seed=3)
    given = [f"model={foreign}", f"base={other}", f"output_dir={tmp_path / 'b'}", *mask]
    status, shown = run(given, capsys)
    assert status == 0 and "are not those of base=" in shown
    config = PEFT | {"base_model_name_or_path": str(base)}
    (foreign / "adapter" / "adapter_config.json").write_text(json.dumps(config))
    given = [f"model={foreign / 'adapter'}", f"output_dir={tmp_path / 'c'}", *mask]
    assert run(given, capsys)[0] == 0
    assert AdapterSpec.load(tmp_path / "c").base_path == str(base.resolve())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"use_dora": True}, "IDLM-0610 use_dora=True"),
        ({"modules_to_save": ["lm_head"]}, "IDLM-0610 modules_to_save=['lm_head']"),
        ({"r": 4}, "IDLM-0613 shape"),
        ({"r": 2, "rank_pattern": {"q_proj": 3}}, "IDLM-0613 rank"),
        ({"alpha_pattern": {"q_proj(": 4}}, "IDLM-0610 pattern"),
        ({"target_modules": 5}, "IDLM-0610 target_modules=5"),
        ({"target_modules": ["q_proj"]}, "IDLM-0613 not used"),
        ({"target_modules": [*PROJECTIONS, "lm_head"]}, "IDLM-0613 lm_head"),
    ],
    ids=str,
)
def test_what_does_not_fit_the_base_is_refused(
    foreign: Path, base: Path, tmp_path: Path, change: Any, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (foreign / "adapter" / "adapter_config.json").write_text(json.dumps(PEFT | change))
    status, shown = run(
        [f"model={foreign}", f"base={base}", f"output_dir={tmp_path / 'o'}", *UNIFORM], capsys
    )
    code, _, word = words.partition(" ")
    assert status == 2 and code in shown and word in shown, shown
    assert "staging" not in shown and not (tmp_path / "o").exists()


@pytest.mark.parametrize("is_tied", [False, True])
def test_embeddings_next_to_the_adapter_are_those_of_the_base(
    foreign: Path, base: Path, tmp_path: Path, is_tied: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    base = write_toy_checkpoint(tmp_path / "tied", tie_embeddings=True) if is_tied else base
    path, embed, head = foreign / "adapter" / WEIGHTS_FILE, "model.embed_tokens.weight", "lm_head.weight"
    adapter, own = load_file(path), load_file(base / "model.safetensors")
    copies = {f"base_model.model.{name}": own.get(name, own[embed]) for name in (embed, head)}
    given = [f"model={foreign}", f"base={base}", f"output_dir={tmp_path / 'o'}", *UNIFORM]
    save_file(adapter | {name: value.clone() for name, value in copies.items()}, path)
    assert run(given, capsys)[0] == 0 and load_file(tmp_path / "o" / WEIGHTS_FILE).keys() == adapter.keys()
    save_file(adapter | {f"base_model.model.{head}": own[embed] + 1}, path)
    status, shown = run(given, capsys)
    assert status == 2 and "another base_model.model.lm_head.weight" in shown and "resized" in shown


@pytest.mark.parametrize("names", [r".*\.(q|down)_proj", ["self_attn.q_proj", "down_proj"]], ids=str)
def test_targets_of_a_pattern_or_path_and_a_stabilised_rank_are_read(
    foreign: Path, base: Path, tmp_path: Path, names: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    config, weights = (foreign / "adapter" / name for name in ("adapter_config.json", WEIGHTS_FILE))
    config.write_text(json.dumps(PEFT | {"target_modules": names, "use_rslora": True}))
    tensors = load_file(weights)
    save_file({name: tensors[name] for name in tensors if "q_proj" in name or "down_proj" in name}, weights)
    given = [f"model={foreign}", f"base={base}", f"output_dir={tmp_path / 'o'}", *UNIFORM]
    status, shown = run(given, capsys)
    assert status == 0, shown
    spec = AdapterSpec.load(tmp_path / "o")
    assert spec.targets == ("down_proj", "q_proj") and spec.scaling == pytest.approx(48 / 3**0.5)


def test_another_base_and_missing_values_are_named(
    foreign: Path, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*arguments: str, model: Path = foreign, base: Path | str = base) -> str:
        given = [f"model={model}", f"base={base}", f"output_dir={tmp_path / 'o'}", *arguments]
        status, shown = run(given, capsys)
        assert status == 2, shown
        return shown

    wide = write_toy_checkpoint(tmp_path / "wide", width=48)
    shown = refused(*UNIFORM, base=wide)
    assert "IDLM-0613" in shown and "give base= the base that they were trained on" in shown
    assert "gated, stride, mask_token_id or noise_range is missing" in refused()
    assert "gated=false: the adapter changes every row" in refused("gated=false", *UNIFORM[1:])
    assert "did you mean 'uno_qwen3_8b'" in refused("preset=uno_qwen3_8")
    assert "IDLM-0606" in refused("preset=uno_qwen3_8b")
    assert "IDLM-0304" in refused(*UNIFORM, "mask_token_id=4")
    assert "IDLM-0611" in refused(*UNIFORM, base=tmp_path / "gone")
    assert "adapter_config.json is not there" in refused(*UNIFORM, model=base)
    shutil.copytree(foreign / "adapter", foreign / "final_adapter")
    assert "is in 2 folders" in refused(*UNIFORM)
    (foreign / "adapter" / WEIGHTS_FILE).write_bytes(POINTER + b"v1\n")
    assert "pointer of Git LFS" in refused(*UNIFORM, model=foreign / "adapter")
    (foreign / "adapter" / WEIGHTS_FILE).write_bytes(b"not tensors")
    assert "IDLM-0607" in refused(*UNIFORM, model=foreign / "adapter")
    (foreign / "adapter" / WEIGHTS_FILE).rename(foreign / "adapter" / "adapter_model.bin")
    assert "cannot be read as tensors" in refused(*UNIFORM, model=foreign / "adapter")
    (foreign / "adapter" / "adapter_model.bin").unlink()
    assert "has no tensors" in refused(*UNIFORM, model=foreign / "adapter")


def test_presets_are_whole_and_what_is_given_takes_their_place() -> None:
    for name in PRESETS:
        config = command._complete(ImportConfig(model="a", output_dir="b", preset=name, stride=8), {})
        assert config.gated and config.stride == 8
        assert (config.mask_token_id is None) == bool(config.noise_range)
    given = ImportConfig(model="a", output_dir="b", preset="uno_qwen3_8b", mask_token_id=7)
    assert command._complete(given, {}).noise_range == []
    assert len(PRESETS["uno_qwen3_8b"]["acceptance"]) == PRESETS["uno_qwen3_8b"]["stride"] - 1
    assert callable(main)


def of_a_model(name: str) -> str:
    return f"{name.removesuffix('.weight')}.default.weight"


@pytest.mark.parametrize(
    "named",
    [
        of_a_model,
        lambda name: name.removeprefix("base_model.model."),
        lambda name: f"module.{of_a_model(name)}",
        lambda name: name.replace("model.layers.1.", "_orig_mod.model.layers.1._checkpoint_wrapped_module."),
        lambda name: f"_orig_mod.module.{name}",
    ],
    ids=["model", "bare", "ddp", "compiled", "both"],
)
def test_names_of_wrapped_modules_are_those_of_peft(
    foreign: Path, base: Path, tmp_path: Path, named: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    path = foreign / "adapter" / WEIGHTS_FILE
    tensors = load_file(path)
    save_file({named(name): tensor for name, tensor in tensors.items()}, path)
    status, shown = run(
        [f"model={foreign}", f"base={base}", f"output_dir={tmp_path / 'o'}", *UNIFORM], capsys
    )
    assert status == 0, shown
    stored = load_file(tmp_path / "o" / WEIGHTS_FILE)
    assert stored.keys() == tensors.keys()
    assert all(torch.equal(stored[name], tensors[name]) for name in tensors)


def test_tensors_that_are_no_single_adapter_are_refused(
    foreign: Path, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = foreign / "adapter" / WEIGHTS_FILE
    tensors, first = load_file(path), "base_model.model.model.layers.0.mlp.up_proj.lora_A.weight"
    given = [f"model={foreign}", f"base={base}", f"output_dir={tmp_path / 'o'}", *UNIFORM]
    for other in (first.replace(".weight", ".draft.weight"), f"module.{first}"):
        save_file(tensors | {other: tensors[first].clone()}, path)
        status, shown = run(given, capsys)
        assert status == 2 and "several" in shown and "selected_adapters" in shown, shown
    for value in (float("nan"), float("-inf")):
        bad = tensors[first].clone()
        bad[1, 2] = value
        save_file(tensors | {first: bad}, path)
        status, shown = run(given, capsys)
        assert status == 2 and f"not finite, {first} first" in shown and not (tmp_path / "o").exists()


def test_an_adapter_of_idlm_is_imported_with_all_that_it_states(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its base may be saved anew, in another type."""
    import transformers

    ours = write_adapter(tmp_path / "ours", base, mask_token_id=99, stride=3, has_mask_row=True)
    add_selector(ours, vocab_size=48, width=32)
    save_byte_level(ours)
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64)
    model.save_pretrained(tmp_path / "wide")
    given = [f"model={ours}", f"base={tmp_path / 'wide'}", f"output_dir={tmp_path / 'o'}"]
    status, shown = run([*given, "stride=2"], capsys)
    assert status == 0 and "ids, more than the 48 rows of the base" in shown, shown
    before, after = Semantics.load(ours), Semantics.load(tmp_path / "o")
    assert after == replace(before, stride=2, base_identity=base_identity(tmp_path / "wide"))
    assert (
        after.selector == "path" and check_selector("path", tmp_path / "o", vocab_size=48, width=32) is None
    )
    assert load_file(tmp_path / "o" / WEIGHTS_FILE).keys() == load_file(ours / WEIGHTS_FILE).keys()
    assert not (tmp_path / "o" / "tokenizer.json").exists()


def test_a_tokenizer_and_a_licence_beside_the_adapter_come_along(
    foreign: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = write_spelling_toy(tmp_path / "base")
    folder = write_adapter(foreign / "adapter", base, mask_token_id=334, stride=2)
    save_byte_level(folder)
    (folder / "chat_template.jinja").write_text("{{ messages[0]['content'] }}!")
    (folder / "LICENSE").write_text("Free.")
    given = [f"model={foreign}", f"base={base}", f"output_dir={tmp_path / 'o'}"]
    assert run(given, capsys)[0] == 0
    names = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "LICENSE")
    assert all((tmp_path / "o" / name).read_bytes() == (folder / name).read_bytes() for name in names)
    assert run(given, capsys)[0] == 0, "an import may be repeated"


def test_no_other_checkpoint_is_replaced_or_added_to(
    foreign: Path, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with publish(tmp_path / "trained") as staging:
        (staging / "adapter_config.json").write_text("{}")
        (staging / "README.md").write_text("A card.")
    shutil.copytree(base, tmp_path / "whole")
    for name, word in (("trained", "README.md"), ("whole", "config.json")):
        before = {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()}
        given = [f"model={foreign}", f"base={base}", f"output_dir={tmp_path / name}", *UNIFORM]
        status, shown = run(given, capsys)
        assert status == 2 and f"another checkpoint: it has {word}" in shown, shown
        assert before == {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()}


VARIANTS: list[dict[str, Any]] = [
    {
        "rank_pattern": {"q_proj": 6, r"layers\.1\..*down_proj": 1},
        "alpha_pattern": {"up_proj": 24, "q_proj": 5},
    },
    {"rank_pattern": {"self_attn.k_proj": 2}, "use_rslora": True},
    {"layers_to_transform": [1], "alpha_pattern": {"v_proj": 32}},
    {"target_modules": r".*\.1\.self_attn\.(q|v)_proj|.*\.0\..*\.up_proj"},
    {"exclude_modules": ["layers.0.mlp.gate_proj", "q_proj"]},
    {"exclude_modules": ".*mlp.*|k_proj|.*k_proj"},
]


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
def test_modules_of_other_ranks_scales_and_layers_compute_what_peft_does(
    base: Path, tmp_path: Path, changes: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    import transformers
    from peft import LoraConfig, PeftModel, get_peft_model

    def stock() -> Any:
        return transformers.AutoModelForCausalLM.from_pretrained(base).eval()

    given = {"r": 3, "lora_alpha": 12, "target_modules": sorted(PROJECTIONS), "task_type": "CAUSAL_LM"}
    torch.manual_seed(0)
    theirs = get_peft_model(stock(), LoraConfig(**given | {"init_lora_weights": False} | changes)).eval()
    theirs.save_pretrained(tmp_path / "theirs")
    arguments = [f"model={tmp_path / 'theirs'}", f"base={base}", f"output_dir={tmp_path / 'ours'}", *UNIFORM]
    status, shown = run(arguments, capsys)
    assert status == 0, shown
    ours = PeftModel.from_pretrained(stock(), tmp_path / "ours").eval()
    ids_BT = torch.arange(1, 19).view(2, 9)
    with torch.no_grad():
        expected, plain = theirs(ids_BT).logits, stock()(ids_BT).logits
        torch.testing.assert_close(ours(ids_BT).logits, expected, atol=1e-4, rtol=1e-4)
    assert (expected - plain).abs().max() > 0.1


def test_a_tensor_that_the_config_wants_is_not_made_up(
    foreign: Path, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, weights = (foreign / "adapter" / name for name in ("adapter_config.json", WEIGHTS_FILE))
    tensors = load_file(weights)
    lost = next(name for name in tensors if "layers.1.mlp.up_proj.lora_B" in name)
    save_file({name: tensor for name, tensor in tensors.items() if name != lost}, weights)
    given = [f"model={foreign}", f"base={base}", f"output_dir={tmp_path / 'o'}", *UNIFORM]
    for changes in ({"rank_pattern": {"q_proj": 3}}, {"exclude_modules": ["layers.0.mlp.up_proj"]}):
        config.write_text(json.dumps(PEFT | changes))
        status, shown = run(given, capsys)
        assert status == 2 and "IDLM-0613" in shown and lost in shown, shown
