"""Every kind of export loads in transformers 4.57 with the logits and token ids of transformers 5.

IDLM_TRANSFORMERS4 names a folder with transformers 4.57, tokenizers and huggingface_hub, which need the other
packages of this environment: `make test-all` installs it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from idlm.tasks.tokenizer import save_tokenizer
from idlm.text.tokenizer import load_tokenizer, num_token_ids
from idlm.train import cli
from idlm.train.checkpoint.export import PROBES
from idlm.train.model.load import random_model
from tests.integration.training.test_train_tiny import arguments
from tests.tiny_training import tiny_config, write_tiny_base

FOLDER = os.environ.get("IDLM_TRANSFORMERS4", "")
pytestmark = [
    pytest.mark.sweep,
    pytest.mark.skipif(
        not list(Path(FOLDER or "/nowhere").glob("transformers-4.57*")),
        reason=f"IDLM_TRANSFORMERS4={FOLDER!r} has no transformers 4.57: `make test-all` installs it",
    ),
]
ASSETS = Path(__file__).resolve().parents[3] / "recipes" / "assets"
STAGES = "[{stride: 2, steps: 1}, {stride: 3, steps: 1}]"
STEPS = {"train.stages": "[]", "train.steps": 2}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0}
LLAMA3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 64}
TEXTS = (*PROBES, "Lea has 9 shells. Lea wins 3. How many shells does Lea have?", "<eos> a <bos>")
KINDS: dict[str, dict[str, Any]] = {
    "idlm": {},
    "merged": {"adapter.rank": 4, "adapter.alpha": 8, "adapter.gated": "false", "export.merge": "true"},
    "block": {"objective": "block"},
    "full": {"objective": "full", **STEPS},
    "ar": {"objective": "ar", **STEPS},
}
READER = """
import json, sys, torch, transformers
from transformers import AutoModelForCausalLM, AutoTokenizer
found = []
for path in json.loads(sys.argv[1]):
    expected = torch.load(f"{path}.pt")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    with torch.no_grad():
        gap = float((model(expected["ids"]).logits - expected["logits"]).abs().max())
    tokenizer = AutoTokenizer.from_pretrained(path)
    ids = [tokenizer(text)["input_ids"] for text in expected["texts"]]
    found.append([gap, ids == expected["tokens"], tokenizer.chat_template == expected["template"]])
print(json.dumps([transformers.__version__, found]))
"""
PEFT_READER = """
import json, sys, torch, transformers
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer
base, adapter = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
model = PeftModel.from_pretrained(model, adapter).eval()
with torch.no_grad():
    logits = model(torch.arange(40)[None]).logits
AutoTokenizer.from_pretrained(adapter)
print(json.dumps([transformers.__version__, logits.flatten()[::97].tolist()]))
"""


def run(code: str, *given: str) -> Any:
    """The last line of a program's output in transformers 4, as JSON: [version, ...]."""
    environment = os.environ | {"PYTHONPATH": FOLDER, "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", code, *given]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found, result = json.loads(done.stdout.splitlines()[-1])
    assert found.startswith("4."), found
    return result


def expect(directory: Path) -> str:
    """Store what transformers 5 computes beside `directory`; returns its path."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(directory)
    ids = torch.randint(0, model.config.vocab_size, (1, 200), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = model(ids).logits
    tokens = [tokenizer(text)["input_ids"] for text in TEXTS]
    facts = {"texts": list(TEXTS), "tokens": tokens, "template": tokenizer.chat_template}
    torch.save({"ids": ids, "logits": logits, **facts}, f"{directory}.pt")
    return str(directory)


def assert_read_alike(directories: list[Path]) -> None:
    shown = run(READER, json.dumps([expect(directory) for directory in directories]))
    for directory, (gap, has_tokens, has_template) in zip(directories, shown, strict=True):
        assert gap <= 1e-5 and has_tokens and has_template, (directory.name, gap, has_tokens, has_template)


def test_every_kind_of_export_is_read_alike(tmp_path: Path) -> None:
    """And the bundled checkpoints."""
    base = write_tiny_base(tmp_path / "base")
    exports = [tmp_path / kind for kind in KINDS]
    for export in exports:
        changes = {"train.stages": STAGES} | KINDS[export.name]
        assert cli.main(arguments(base, export, **changes)) == 0
    bundled = [tmp_path / "tiny_ar", tmp_path / "tiny_idlm"]
    for link in bundled:
        link.symlink_to(ASSETS / link.name)
    assert_read_alike([*exports, *sorted((tmp_path / "idlm" / "stages").glob("*-stride-2")), *bundled])


def test_a_grown_untied_base_with_scaled_positions_is_read_alike(tmp_path: Path) -> None:
    """As transformers 5 saves it, and with the keys of the hub's older checkpoints."""
    base, old = tmp_path / "base", tmp_path / "old"
    base.mkdir()
    save_tokenizer(base)
    changes = {"tie_word_embeddings": False, "vocab_size": num_token_ids(load_tokenizer(base))}
    config = tiny_config("llama") | changes | {"rope_parameters": LLAMA3}
    model = random_model(config, attention="idlm_sdpa", dtype=torch.float32, seed=0)
    model.save_pretrained(base)
    for path in base.iterdir():
        old.mkdir(exist_ok=True)
        (old / path.name).write_bytes(path.read_bytes())
    values = json.loads((base / "config.json").read_text())
    rope, values["torch_dtype"] = values.pop("rope_parameters"), values.pop("dtype")
    values |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}
    (old / "config.json").write_text(json.dumps(values))
    exports = [tmp_path / "from_new", tmp_path / "from_old"]
    for start, export in zip((base, old), exports, strict=True):
        assert cli.main(arguments(start, export, **{"train.stages": STAGES})) == 0
        assert json.loads((export / "config.json").read_text())["vocab_size"] % 64 == 0
    assert_read_alike(exports)


def test_a_gated_adapter_is_read_alike_by_peft(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", exc_type=ImportError)
    base, export = write_tiny_base(tmp_path / "base"), tmp_path / "gated"
    changes = {"train.stages": STAGES, "adapter.rank": 4, "adapter.alpha": 8}
    assert cli.main(arguments(base, export, **changes)) == 0
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(plain, export).eval()
    with torch.no_grad():
        expected = model(torch.arange(40)[None]).logits.flatten()[::97]
    AutoTokenizer.from_pretrained(export)
    shown = run(PEFT_READER, str(base), str(export))
    torch.testing.assert_close(torch.tensor(shown), expected, atol=1e-5, rtol=0)
