"""ISD against AR with the model sharded over the GPUs of a host, one process per rank, over NCCL.

    python -m benchmarks.tensor_parallel [sizes=1,2,4] [concurrency=64] [context=1024] [strides=2,4]
        [model=qwen3-8b] [layers=12] [passes=60] [rounds=3] [acceptance=0.90] [directory=FOLDER] [record=true]

Random weights of the model's shape in `layers` layers are written to a folder, because every rank loads its
own part. Random drafts are rejected, but with static shapes a pass takes the same time whatever is accepted.
So the benchmark measures the time of a pass without prompts, and computes tokens per pass from `acceptance`
by eq. 3 of I-DLM (arXiv 2604.11035) for strategy `cold`. AR emits one token a pass.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.models import MAX_STRIDE, MODELS
from benchmarks.shared import Report, defaults, numbers, parse_options, start
from idlm.acceptance import tokens_per_forward_cold
from idlm.contracts import SamplingParams
from idlm.devices import free_cached_memory
from idlm.errors import UserError
from idlm.infer.engine import Engine
from idlm.semantics import Semantics

DEFAULTS = defaults(
    "model=qwen3-8b device=cuda sizes=1,2,4 concurrency=64 context=1024 strides=2,4 layers=12 "
    "passes=60 rounds=3 acceptance=0.90 directory= record=true"
)
WARM_UP_PASSES = 12
LARGEST_ID = 64


def measure(arguments: list[str]) -> int:
    """Measure all sizes; returns the exit status. Raises IDLM-0543 when there are too few GPUs."""
    options = parse_options(arguments, DEFAULTS)
    sizes = numbers(options["sizes"])
    if options["device"] == "cuda" and torch.cuda.device_count() < max(sizes):
        raise UserError(
            "IDLM-0543",
            f"sizes={options['sizes']} on {torch.cuda.device_count()} CUDA devices",
            fix="use a host with as many GPUs as the largest size, or smaller sizes",
        )
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(options["directory"] or scratch)
        if not (directory / "config.json").exists():
            shape: dict[str, Any] = {"device": options["device"], "dtype": torch.bfloat16}
            write_checkpoint(directory, options["model"], **shape, num_hidden_layers=int(options["layers"]))
        report = Report("tensor_parallel", options)
        for size in sizes:
            _add_rows(report, directory, size)
    return 0


def write_checkpoint(path: Path, model: str, *, device: str, dtype: torch.dtype, **changes: Any) -> None:
    """Write a checkpoint of random weights that says it was converted; `changes` of its config."""
    import transformers

    shape = {**MODELS[model], **changes}
    config = transformers.Qwen3Config(**shape, tie_word_embeddings=False, eos_token_id=None)
    torch.manual_seed(0)
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            made = transformers.Qwen3ForCausalLM(config)
    finally:
        torch.set_default_dtype(default)
    made.save_pretrained(path, max_shard_size="4GB")
    Semantics(mask_token_id=shape["vocab_size"] - 1, stride=MAX_STRIDE).save(path)
    del made
    free_cached_memory()


def _add_rows(report: Report, directory: Path, size: int) -> None:
    """Result rows of AR and every stride on `size` GPUs."""
    options = dict(report.options)
    case: dict[str, Any] = {name: int(options[name]) for name in ("concurrency", "context", "layers")}
    case |= {"tensor_parallel": size, "model": options["model"]}
    ar = step_ms(options, directory, size, stride=1)
    report.add({**case, "stride": 1}, "step_ms", ar, "ms")
    acceptance = float(options["acceptance"])
    for stride in numbers(options["strides"]):
        step = step_ms(options, directory, size, stride=stride)
        ratio = tokens_per_forward_cold([acceptance] * (stride - 1)) * ar / step
        report.add({**case, "stride": stride}, "step_ms", step, "ms")
        here = {**case, "stride": stride, "acceptance": acceptance, "strategy": "cold"}
        report.add(here, "isd_over_ar", ratio, "x")


def step_ms(options: dict[str, str], directory: Path, size: int, *, stride: int) -> float:
    """Median over rounds of the time of a pass when all sequences decode."""
    concurrency, context, passes = (int(options[name]) for name in ("concurrency", "context", "passes"))
    rounds = int(options["rounds"])
    num_tokens = stride * (WARM_UP_PASSES + rounds * passes + 128)
    own: dict[str, Any] = {"stride": stride, "rejection_strategy": "cold"} if stride > 1 else {}
    engine = Engine.from_pretrained(
        directory,
        "isd" if stride > 1 else "ar",
        tensor_parallel=size,
        device=options["device"],
        max_num_seqs=concurrency,
        max_length=context + num_tokens,
        prefix_cache=False,
        **own,
    )
    try:
        rng = torch.Generator().manual_seed(0)
        params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, seed=0)
        for number in range(concurrency):
            prompt = torch.randint(0, LARGEST_ID, (context,), generator=rng).tolist()
            engine.add_request(str(number), prompt, params)
        started: set[str] = set()
        while len(started) < concurrency:
            started |= {event.request_id for event in engine.step()}
        found = []
        for _ in range(WARM_UP_PASSES):
            engine.step()
        for _ in range(rounds):
            start = time.perf_counter()
            for _ in range(passes):
                engine.step()
            found.append(1e3 * (time.perf_counter() - start) / passes)
        assert engine.has_work, "the answers have ended"
    finally:
        engine.close()
    return sorted(found)[len(found) // 2]


if __name__ == "__main__":
    start(measure, __doc__)
