"""Ranks as processes: one command starts them, a dead one is an error, and none outlives rank 0.

python -m pytest tests/integration/inference/test_tensor_parallel_processes.py -m "sweep or not sweep"
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest
import torch

from idlm.errors import UserError
from idlm.infer.distributed.launcher import DriverWorker, TensorParallelGroup
from idlm.infer.engine import Engine
from tests.contracts.engines import build_engine, greedy, prompts_of, write_converted_toy
from tests.errors import ctrl_c_raises, refused
from tests.integration.inference.command_lines import AR, GREEDY, MODEL, TINY, answer

PATIENCE = 60.0
PROMPT = "Lea has 9 shells. Lea finds 4."
COMMAND = [sys.executable, "-m", "idlm.infer.cli.generate", "tensor_parallel=2"]


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_converted_toy(tmp_path_factory.mktemp("toy"))


def _other_ranks(pid: int) -> list[int]:
    """Processes that `pid` has started."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _is_gone(pid: int) -> bool:
    """Whether a process has ended; a zombie has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def _wait_until_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not all(_is_gone(pid) for pid in pids):
        assert time.monotonic() < deadline, f"{pids=} live on"
        time.sleep(0.05)


def _group(engine: Engine) -> TensorParallelGroup:
    assert isinstance(engine._worker, DriverWorker)
    return engine._worker.group


@pytest.mark.sweep
def test_a_killed_rank_is_an_error(toy: Path) -> None:
    prompts = prompts_of([1, 7, 20])
    one = [
        done.token_ids for done in build_engine(toy, "isd", stride=4).generate(prompts, greedy(max_tokens=9))
    ]
    engine = build_engine(toy, "isd", stride=4, tensor_parallel=2)
    [process] = _group(engine)._processes
    assert [done.token_ids for done in engine.generate(prompts, greedy(max_tokens=9))] == one
    refused("IDLM-0427", build_engine, toy, "ar", tensor_parallel=2)
    engine.add_request("a", prompts[0], greedy(max_tokens=9))
    engine.step()
    process.kill()
    start = time.monotonic()
    with pytest.raises(UserError, match=r"IDLM-0426: rank 1 of 2 is gone \(pid \d+: killed by SIGKILL\)"):
        engine.generate(prompts, greedy(max_tokens=100))
    assert time.monotonic() - start < PATIENCE
    refused("IDLM-0426", engine.generate, prompts, greedy(max_tokens=9))


@pytest.mark.sweep
def test_an_error_on_rank_0_ends_the_others(toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of a pass, where they wait for it."""
    engine = build_engine(toy, "isd", stride=4, tensor_parallel=2)
    [process] = _group(engine)._processes

    def failing(plan: Any) -> torch.Tensor:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(engine._parts.runner, "forward", failing)
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.generate([[1, 2]], greedy(max_tokens=9))
    assert process.poll() is not None
    refused("IDLM-0428: .*out of memory", engine.generate, [[1, 2]], greedy(max_tokens=9))


@pytest.mark.sweep
def test_the_command_starts_its_ranks_and_ctrl_c_ends_all(tmp_path: Path) -> None:
    """The first line is answered, the second is interrupted."""
    lines = tmp_path / "lines.jsonl"
    endless = '{"prompt_ids": [5, 6], "sampling": {"max_tokens": 1500, "ignore_eos": true}}\n'
    lines.write_text(f'{{"prompt": "{PROMPT}"}}\n' + endless * 40)
    arguments = [*COMMAND, *MODEL[:2], *AR, *GREEDY, f"input={lines}", "max_num_seqs=2"]
    with ctrl_c_raises():
        started = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with started as command:
        assert command.stdout is not None
        first = command.stdout.readline()
        ranks = _other_ranks(command.pid)
        assert len(ranks) == 1
        command.send_signal(signal.SIGINT)
        _, errors = command.communicate(timeout=PATIENCE)
    assert first == answer(PROMPT).text + "\n"
    assert (command.returncode, errors) == (130, "interrupted\n")
    _wait_until_gone(ranks)


@pytest.mark.sweep
def test_all_ranks_end_after_rank_0_is_killed(toy: Path) -> None:
    script = (
        "from idlm.infer.engine import Engine\n"
        f"engine = Engine.from_pretrained({str(toy)!r}, 'ar', device='cpu', tensor_parallel=2)\n"
        "print('ready', flush=True)\n"
        "while True:\n"
        "    engine.generate([[1, 2]])\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as command:
        assert command.stdout is not None
        assert command.stdout.readline() == "ready\n"
        ranks = _other_ranks(command.pid)
        assert len(ranks) == 1
        assert not _is_gone(ranks[0])
        command.kill()
    _wait_until_gone(ranks)


@pytest.mark.sweep
def test_a_rank_ends_if_rank_0_ended_before_it_started() -> None:
    """Though another process still has the other end of its connection."""
    ours, theirs = Pipe()
    with ours, theirs:
        arguments = [sys.executable, "-P", "-m", "idlm.infer.distributed.rank", str(theirs.fileno()), "1"]
        with subprocess.Popen(arguments, pass_fds=[theirs.fileno()]) as process:
            assert process.wait(PATIENCE) == 0


def test_what_stands_in_the_way_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"tensor_parallel": 2, "max_length": 64}
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "device_count", lambda: 1)
        for device in ("cuda", "auto"):
            with pytest.raises(UserError, match="IDLM-0425: .* torch sees 1 GPU"):
                Engine.from_pretrained(TINY, "ar", device=device, **options)
        patch.setattr(torch.cuda, "device_count", lambda: 4)
        refused("IDLM-0425: .*device=cuda:2", Engine.from_pretrained, TINY, "ar", device="cuda:2", **options)
    monkeypatch.setitem(os.environ, "WORLD_SIZE", "2")
    refused("IDLM-0427: .* WORLD_SIZE=2", Engine.from_pretrained, TINY, "ar", device="cpu", **options)
    with pytest.raises(UserError, match="IDLM-0415: deterministic=true with tensor_parallel=4"):
        Engine.from_pretrained(TINY, "ar", device="cuda", tensor_parallel=4, deterministic=True)
    with pytest.raises(UserError, match="IDLM-0415: tensor_parallel=0"):
        Engine.from_pretrained(TINY, "ar", device="cpu", tensor_parallel=0)
