"""Every kind of export loads in transformers 4.57 with the logits and token ids of transformers 5.

IDLM_TRANSFORMERS4 names a folder with transformers 4.57, tokenizers and huggingface_hub, which need the other
packages of this environment: `make test-all` installs it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import peft
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
    "gated": {"adapter.rank": 4, "adapter.alpha": 8},
    "merged": {"adapter.rank": 4, "adapter.alpha": 8, "adapter.gated": "false", "export.merge": "true"},
    "block": {"objective": "block"},
    "full": {"objective": "full", **STEPS},
    "ar": {"objective": "ar", **STEPS},
}
READER = """
import json, sys, torch, transformers
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer
found = []
for path, base in json.loads(sys.argv[1]):
    expected = torch.load(f"{path}.pt")
    model = AutoModelForCausalLM.from_pretrained(base or path, dtype=torch.float32)
    model = (PeftModel.from_pretrained(model, path) if base else model).eval()
    with torch.no_grad():
        gap = float((model(expected["ids"]).logits - expected["logits"]).abs().max())
    tokenizer = AutoTokenizer.from_pretrained(path)
    ids = [tokenizer(text)["input_ids"] for text in expected["texts"]]
    found.append([gap, ids == expected["tokens"], tokenizer.chat_template == expected["template"]])
print(json.dumps([transformers.__version__, found]))
"""


def expect(directory: Path, base: Path | None) -> None:
    """Store what transformers 5 computes beside `directory`, an adapter where it has a base."""
    model = AutoModelForCausalLM.from_pretrained(base or directory, dtype=torch.float32)
    model = (peft.PeftModel.from_pretrained(model, directory) if base else model).eval()
    tokenizer = AutoTokenizer.from_pretrained(directory)
    ids = torch.randint(0, model.config.vocab_size, (1, 200), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = model(ids).logits
    tokens = [tokenizer(text)["input_ids"] for text in TEXTS]
    facts = {"texts": list(TEXTS), "tokens": tokens, "template": tokenizer.chat_template}
    torch.save({"ids": ids, "logits": logits, **facts}, f"{directory}.pt")


def every_kind(folder: Path) -> list[tuple[Path, Path | None]]:
    """Exports of every kind, with the base of a gated adapter, and the bundled checkpoints."""
    base = write_tiny_base(folder / "base")
    for kind, changes in KINDS.items():
        assert cli.main(arguments(base, folder / kind, **{"train.stages": STAGES} | changes)) == 0
    bundled = [folder / "tiny_ar", folder / "tiny_idlm"]
    for link in bundled:
        link.symlink_to(ASSETS / link.name)
    stages = (folder / "idlm" / "stages").glob("*-stride-2")
    whole = [*(folder / kind for kind in KINDS if kind != "gated"), *stages, *bundled]
    return [(folder / "gated", base), *((path, None) for path in whole)]


def scaled_positions(folder: Path) -> list[tuple[Path, Path | None]]:
    """Exports of a grown, untied base as transformers 5 saves it, and with the keys of the hub's older
    checkpoints."""
    base, old = folder / "base", folder / "old"
    base.mkdir()
    save_tokenizer(base)
    changes = {"tie_word_embeddings": False, "vocab_size": num_token_ids(load_tokenizer(base))}
    config = tiny_config("llama") | changes | {"rope_parameters": LLAMA3}
    model = random_model(config, attention="idlm_sdpa", dtype=torch.float32, seed=0)
    model.save_pretrained(base)
    shutil.copytree(base, old)
    values = json.loads((base / "config.json").read_text())
    rope, values["torch_dtype"] = values.pop("rope_parameters"), values.pop("dtype")
    values |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}
    (old / "config.json").write_text(json.dumps(values))
    exports = [folder / "from_new", folder / "from_old"]
    for start, export in zip((base, old), exports, strict=True):
        assert cli.main(arguments(start, export, **{"train.stages": STAGES})) == 0
        assert json.loads((export / "config.json").read_text())["vocab_size"] % 64 == 0
    return [(export, None) for export in exports]


def test_every_kind_of_export_is_read_alike(tmp_path: Path) -> None:
    """By one process, whose imports take longer than all the rest."""
    for name in ("kinds", "scaled"):
        (tmp_path / name).mkdir()
    exports = [*every_kind(tmp_path / "kinds"), *scaled_positions(tmp_path / "scaled")]
    for export, base in exports:
        expect(export, base)
    given = json.dumps([(str(export), base and str(base)) for export, base in exports])
    environment = os.environ | {"PYTHONPATH": FOLDER, "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", READER, given]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    version, shown = json.loads(done.stdout.splitlines()[-1])
    assert version.startswith("4."), version
    for (export, _), (gap, has_tokens, has_template) in zip(exports, shown, strict=True):
        assert gap <= 1e-5 and has_tokens and has_template, (export.name, gap, has_tokens, has_template)
