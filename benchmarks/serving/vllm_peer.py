"""The loads of `benchmarks.serve` on vLLM, in a process of its own that imports nothing of ours.

    PYTHONPATH=DIR python benchmarks/serving/vllm_peer.py JOB.json RESULT.json

`DIR` holds vLLM and what it needs. This file is both sides: `run_vllm` writes the job, starts the process and
reads the result; `main` is the process. vLLM has its own defaults (graphs, asynchronous scheduling) but for
limits, 8,192 prompt rows a pass (with which it is fastest) and no prefix cache."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

SECONDS, TAIL_CHARS = 420, 3000
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    # Its sampler with top-k and top-p needs a compiler on the machine; no load uses either.
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
}


def run_vllm(
    folder: str,
    path: Path,
    loads: Mapping[str, Sequence[tuple[list[int], int]]],
    *,
    greedy: Sequence[str] = (),
    **limits: Any,
) -> dict[str, Any]:
    """Run loads of (prompt, answer tokens), all requests of a load queued at once, in order. `greedy` names
    those that draw nothing, whose tokens come back. `limits`: `dtype`, `max_num_seqs`, `max_model_len`,
    `max_num_batched_tokens`.

    Returns `version`, `load_s`, and by load `seconds`, `num_tokens` of each answer and `token_ids`.
    Raises UserError IDLM-0712 with the end of its output if it did not end well."""
    from idlm.errors import UserError

    with tempfile.TemporaryDirectory(prefix="idlm-vllm-") as home:
        job, result = Path(home) / "job.json", Path(home) / "result.json"
        job.write_text(
            json.dumps({"path": str(path), "limits": limits, "loads": dict(loads), "greedy": list(greedy)})
        )
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
        caches = {
            "VLLM_CACHE_ROOT": str(Path(folder) / "cache"),
            "TORCHINDUCTOR_CACHE_DIR": f"{home}/inductor",
        }
        # The environment variable, because vLLM starts processes of its own.
        environment = {**caches, **environment, **ENVIRONMENT, "PYTHONPATH": folder}
        command = [sys.executable, "-P", __file__, str(job), str(result)]
        with tempfile.TemporaryFile() as log:
            process = subprocess.Popen(
                command, env=environment, stdout=log, stderr=log, start_new_session=True
            )
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(SECONDS)
            # Its engine is a process of its own, which holds the GPU's memory.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            log.seek(max(0, log.seek(0, os.SEEK_END) - TAIL_CHARS))
            text = log.read().decode(errors="replace")
        if not result.exists():
            raise UserError("IDLM-0712", f"vLLM has no result; output: {text}", fix="correct what it names")
        found: dict[str, Any] = json.loads(result.read_text())
        return found


def main() -> None:
    """The process: run the job, and write the result at the end."""
    from vllm import LLM, SamplingParams, __version__

    job = json.loads(Path(sys.argv[1]).read_text())
    start_time = time.perf_counter()
    llm = LLM(
        model=job["path"],
        skip_tokenizer_init=True,
        generation_config="vllm",
        enable_prefix_caching=False,
        gpu_memory_utilization=0.9,
        seed=0,
        attention_config={"backend": "FLASH_ATTN"},
        **job["limits"],
    )
    result = {"version": __version__, "load_s": time.perf_counter() - start_time, "loads": {}}
    for name, requests in job["loads"].items():
        is_greedy = name in job["greedy"]
        params = [
            SamplingParams(
                temperature=0.0 if is_greedy else 1.0, max_tokens=number, ignore_eos=True, detokenize=False
            )
            for _, number in requests
        ]
        prompts = [{"prompt_token_ids": prompt} for prompt, _ in requests]
        start_time = time.perf_counter()
        answers = [list(one.outputs[0].token_ids) for one in llm.generate(prompts, params, use_tqdm=False)]
        result["loads"][name] = {
            "seconds": time.perf_counter() - start_time,
            "num_tokens": [len(answer) for answer in answers],
            "token_ids": answers if is_greedy else [],
        }
        print(name, result["loads"][name]["seconds"], flush=True)
    Path(sys.argv[2]).write_text(json.dumps(result))
    llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
