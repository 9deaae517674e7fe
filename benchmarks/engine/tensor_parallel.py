"""ISD against AR with the model sharded over the GPUs of a host, one process per rank.

    python -m benchmarks.tensor_parallel [sizes=1,2,4] [concurrency=64] [context=1024] [strides=4,8]
        [model=qwen3-8b] [layers=36] [passes=60] [rounds=3] [acceptance=0.90] [links=true]
        [directory=FOLDER] [record=true]

Random weights of the model's shape in `layers` layers are written to a folder, because every rank loads its
own part. Random drafts are rejected, but with static shapes a pass takes the same time whatever is accepted.
So the benchmark measures the time of a pass without prompts, and computes tokens per pass from `acceptance`
by eq. 3 of I-DLM (arXiv 2604.11035) for strategy `cold`. AR, which is stride 1, emits one token a pass.
With `links=false` ranks sum by NCCL alone; `speedup` is over one GPU, if `sizes` starts with 1."""

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
from idlm.infer.distributed.launcher import TensorParallelGroup, create_worker
from idlm.infer.engine import Engine
from idlm.infer.settings import check_options
from idlm.semantics import Semantics

DEFAULTS = defaults(
    "model=qwen3-8b device=cuda sizes=1,2,4 concurrency=64 context=1024 strides=4,8 layers=36 "
    "passes=60 rounds=3 acceptance=0.90 links=true directory= record=true"
)
WARM_UP_PASSES = 12
LARGEST_ID, PROMPTS_PER_PASS = 64, 8


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
        report, alone = Report("tensor_parallel", options), dict[int, float]()
        for size in sizes:
            steps = _add_rows(report, directory, size, alone)
            alone = steps if size == 1 else alone
    return 0


def write_checkpoint(path: Path, model: str, *, device: str, dtype: torch.dtype, **changes: Any) -> None:
    """Write a checkpoint of random weights that is marked as converted; `changes` of its config."""
    import transformers

    shape = {"model_type": "qwen3", **MODELS[model], **changes}
    fixed = {"tie_word_embeddings": False, "eos_token_id": None, "bos_token_id": None}
    config = transformers.AutoConfig.for_model(**shape, **fixed)
    torch.manual_seed(0)
    with torch.device(device):
        made = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    made.save_pretrained(path, max_shard_size="4GB")
    Semantics(mask_token_id=shape["vocab_size"] - 1, stride=MAX_STRIDE).save(path)
    del made
    free_cached_memory()


def _add_rows(report: Report, directory: Path, size: int, alone: dict[int, float]) -> dict[int, float]:
    """Add rows of AR and every stride on `size` GPUs; returns milliseconds of a pass by stride. `alone`:
    those of one GPU, if they are known."""
    options, found, acceptance = dict(report.options), dict[int, float](), float(report.options["acceptance"])
    links = options["links"] == "true"
    case: dict[str, Any] = {name: int(options[name]) for name in ("concurrency", "context", "layers")}
    case |= {"model": options["model"]} | ({} if links else {"links": False})
    group = None
    if size > 1:
        group = TensorParallelGroup.start(size, torch.device(options["device"]), links=links)
    try:
        for stride in (1, *numbers(options["strides"])):
            here = {**case, "stride": stride, "gpus": size}
            found[stride] = step_ms(options, directory, group, stride=stride)
            report.add(here, "step_ms", found[stride], "ms")
            if stride > 1:
                ratio = tokens_per_forward_cold([acceptance] * (stride - 1)) * found[1] / found[stride]
                report.add(here, "isd_over_ar", ratio, "x")
            if stride in alone:
                report.add(here, "speedup", alone[stride] / found[stride], "x")
    finally:
        if group is not None:
            group.close()
    return found


def step_ms(
    options: dict[str, str], directory: Path, group: TensorParallelGroup | None, *, stride: int
) -> float:
    """Median over rounds of the time of a pass when all sequences decode, by the ranks of `group`."""
    concurrency, context, passes = (int(options[name]) for name in ("concurrency", "context", "passes"))
    rounds = int(options["rounds"])
    num_tokens = stride * (WARM_UP_PASSES + rounds * passes + 128)
    own: dict[str, Any] = {"stride": stride, "rejection_strategy": "cold"} if stride > 1 else {}
    settings: dict[str, Any] = {
        "device": options["device"],
        "max_num_seqs": concurrency,
        "max_length": context + num_tokens,
        "max_num_batched_tokens": PROMPTS_PER_PASS * context,
        "prefix_cache": False,
        **own,
    }
    decoder = "isd" if stride > 1 else "ar"
    if group is None:
        engine = Engine.from_pretrained(directory, decoder, **settings)
    else:
        settings["tensor_parallel"] = group.shards.size
        worker = create_worker(directory, check_options(decoder, settings), group)
        engine = Engine(worker.parts, worker)
        del worker
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
        if group is None:
            engine.close()
        del engine
        free_cached_memory()
    return sorted(found)[len(found) // 2]


if __name__ == "__main__":
    start(measure, __doc__)
