"""What this process is left with by imports, and what `deterministic=true` asks MKL for on a CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from idlm.errors import UserError
from idlm.infer.engine import Engine
from idlm.infer.runtime import deterministic
from tests.contracts.engines import greedy, prompts_of
from tests.toy import write_toy_checkpoint

OTHERWISE = "use deterministic=false, or a Hopper GPU"
OPTIONS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_length": 64}
STATE = """
import json, logging, os, signal, sys, torch, warnings
def state():
    flags = {name: str(getattr(torch, name)()) for name in (
        "get_num_threads", "get_num_interop_threads", "get_default_dtype", "is_grad_enabled",
        "are_deterministic_algorithms_enabled", "get_float32_matmul_precision", "is_inference_mode_enabled")}
    backends = torch.backends
    flags["backends"] = str((backends.cuda.matmul.allow_tf32, backends.mkldnn.enabled))
    flags["handlers"] = str([signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)])
    flags["logging"] = str((logging.root.level, logging.root.handlers))
    # A folder of torch.compile, which torch sets.
    others = ("TORCHINDUCTOR_CACHE_DIR",)
    return flags | {name: value for name, value in os.environ.items() if name not in others}
import transformers, torch
before = state()
import idlm
idlm.Engine, idlm.Completion, idlm.SamplingParams
import idlm.infer.engine, idlm.kernels.linear, idlm.checkpoint, idlm.train.pipeline
print(json.dumps([before, state()]))
"""


@pytest.mark.sweep
def test_an_import_changes_nothing_of_the_process() -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MKL", "OMP"))}
    command = [sys.executable, "-c", STATE]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    before, after = json.loads(done.stdout)
    assert "MKL_CBWR" not in before and after == before


@pytest.fixture
def no_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MKL_CBWR", "to be restored")
    monkeypatch.delenv("MKL_CBWR")


def decides(monkeypatch: pytest.MonkeyPatch, *dtypes: torch.dtype) -> None:
    """Products of these dtypes keep the bits of a row."""
    monkeypatch.setattr(deterministic, "check_rows_agree", lambda device, dtype: dtype in dtypes)


def test_only_a_deterministic_engine_asks_for_strict_products(
    toy: Path, no_mode: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, params = prompts_of([5, 9, 3]), greedy(max_tokens=6)
    usual = Engine.from_pretrained(toy, "ar", **OPTIONS)
    assert "MKL_CBWR" not in os.environ
    decides(monkeypatch, torch.float32)
    fixed = Engine.from_pretrained(toy, "ar", deterministic=True, **OPTIONS)
    assert os.environ["MKL_CBWR"] == "AUTO,STRICT"
    answers = [engine.generate(prompts, params) for engine in (usual, fixed)]
    assert [one.token_ids for one in answers[0]] == [one.token_ids for one in answers[1]]
    monkeypatch.setenv("MKL_CBWR", "AVX2,STRICT")
    Engine.from_pretrained(toy, "ar", deterministic=True, **OPTIONS)
    assert os.environ["MKL_CBWR"] == "AVX2,STRICT", "a mode that the user has chosen stays"


@pytest.mark.parametrize(
    ("decoder", "limit"),
    [({"decoder": "ar"}, 64), ({"stride": 4}, 16), ({"stride": 8}, 1), ({"stride": 9}, 0)],
)
def test_auto_is_true_for_engines_of_few_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, decoder: dict[str, Any], limit: int
) -> None:
    checkpoint = write_toy_checkpoint(tmp_path)
    options = {"decoder": "isd", "dtype": "bfloat16", "deterministic": "auto", "mask_token_id": 47, **decoder}

    def chosen(**others: Any) -> bool | str:
        return Engine.from_pretrained(checkpoint, **OPTIONS | options | others).settings.deterministic

    assert chosen(max_num_seqs=1) is False, "a CPU has no measured loads"
    monkeypatch.setattr(deterministic, "has_gluon", lambda device: True)
    monkeypatch.setattr(deterministic, "problems", lambda *given, **options: [])
    decides(monkeypatch, torch.bfloat16)
    assert [chosen(max_num_seqs=num) for num in (max(limit, 1), limit + 1)] == [limit > 0, False]
    assert not any(chosen(max_num_seqs=1, **one) for one in ({"dtype": "float32"}, {"attention": "torch"}))
    decides(monkeypatch)
    assert chosen(max_num_seqs=1) is False


STRICT = "set MKL_CBWR=AUTO,STRICT before Python starts (MKL already has another mode)"


@pytest.mark.parametrize(
    ("dtype", "working", "new_process", "fix"),
    [
        ("bfloat16", [torch.float32], None, "use dtype=float32"),
        ("float32", [], 0, STRICT),
        ("bfloat16", [], 0, f"{STRICT}, with dtype=float32"),
        ("float32", [], 1, f"{OTHERWISE}: strict mode of MKL has no effect on this CPU"),
    ],
)
def test_a_refusal_names_what_helps(
    toy: Path,
    no_mode: None,
    monkeypatch: pytest.MonkeyPatch,
    dtype: str,
    working: list[torch.dtype],
    new_process: int | None,
    fix: str,
) -> None:
    decides(monkeypatch, *working)

    def run(command: list[str], *, env: dict[str, str], **options: Any) -> SimpleNamespace:
        assert new_process is not None and env["MKL_CBWR"] == "AUTO,STRICT"
        return SimpleNamespace(returncode=new_process)

    monkeypatch.setattr(deterministic.subprocess, "run", run)
    with pytest.raises(UserError, match="IDLM-0456: deterministic=true: on this CPU") as caught:
        Engine.from_pretrained(toy, "ar", deterministic=True, **OPTIONS | {"dtype": dtype})
    assert caught.value.fix == fix


@pytest.mark.sweep
def test_a_new_process_says_what_the_cpu_can() -> None:
    """Without the fake of the test above: the fix that is given works."""
    from tests.margins import rows_keep_bits

    fix = deterministic._fix_on_a_cpu(torch.float32)
    assert ("MKL_CBWR=AUTO,STRICT" in fix) == rows_keep_bits()
