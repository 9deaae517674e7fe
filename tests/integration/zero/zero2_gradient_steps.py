"""One process of `test_zero2_gradients.py`: optimizer steps of DeepSpeed with and without `shorten`.

    torchrun --nproc-per-node N -m tests.integration.zero.zero2_gradient_steps FOLDER DEVICE

Rank 0 writes what it found to FOLDER/results.json."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from idlm.config.compose import compose
from idlm.train.config.schema import TrainConfig
from idlm.train.distributed.deepspeed_settings import deepspeed_config, prepare_environment
from idlm.train.distributed.zero2_gradients import shorten
from tests.integration.zero.determinism import fix_order_of_sums

MICRO_BATCHES, STEPS = 3, 4
RATE = 1e-2
CASES: dict[str, dict[str, Any]] = {
    "zero2": {"clip": 1e6},
    "overlapped": {"clip": 1e6, "overlap_comm": True},
    # On a CPU norms fall from 4.5 to 1: the first steps are clipped, the last are not.
    "clipped": {"clip": 1.5},
    "averaged": {"clip": 1e6, "gradient_allreduce_op": "mean"},
    "infinite": {"clip": 1.0, "bad_step": 1},
    "zero1": {"stage": 1, "clip": 1.0},
    "zero1_infinite": {"stage": 1, "clip": 1.0, "bad_step": 1},
    "zero1_averaged": {"stage": 1, "clip": 1.0, "gradient_allreduce_op": "mean"},
    "offload": {"stage": 2, "clip": 1.0, "offload": "true"},
    "float32": {"stage": 2, "clip": 1.0, "dtype": "float32"},
}


class Stream:
    """In place of CUDA's streams on a CPU, where all work is done in the order of its calls."""

    def __init__(self) -> None:
        self.waits = 0

    def wait_stream(self, other: Stream) -> None:
        other.waits += 1


def engine_of(case: dict[str, Any], device: str, width: int) -> Any:
    """An engine with a model whose sizes are odd, so that partitions split gradients and have padding."""
    import deepspeed

    dtype = case.get("dtype", "bfloat16")
    values = {
        "objective": "ar",
        "data.source": "task",
        "model.tokenizer": "task",
        "model.config.model_type": "qwen3",
        "model.dtype": dtype,
        "train.steps": 1,
        "train.zero_stage": case.get("stage", 2),
        "train.offload_optimizer": case.get("offload", "false"),
    }
    config = compose("train", TrainConfig, [f"{key}={value}" for key, value in values.items()])
    settings = deepspeed_config(config, device)
    settings |= {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": MICRO_BATCHES}
    settings |= {"train_batch_size": MICRO_BATCHES * dist.get_world_size(), "gradient_clipping": case["clip"]}
    if "gradient_allreduce_op" in case:
        settings["gradient_allreduce_op"] = case["gradient_allreduce_op"]
    # Several buckets in one backward pass.
    settings["zero_optimization"]["reduce_bucket_size"] = 2 * width * width
    if "overlap_comm" in case:
        settings["zero_optimization"]["overlap_comm"] = True
    settings["zero_allow_untested_optimizer"] = True
    torch.manual_seed(0)
    layers = [layer for _ in range(6) for layer in (nn.Linear(width, width), nn.LayerNorm(width))]
    model = nn.Sequential(*layers, nn.Linear(width, 7)).to(device, getattr(torch, dtype))
    groups = [
        {"params": [one for one in model.parameters() if one.ndim > 1], "weight_decay": 0.1},
        {"params": [one for one in model.parameters() if one.ndim == 1], "weight_decay": 0.0},
    ]
    return deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(groups, lr=RATE), config=settings)[0]


def steps_of(case: dict[str, Any], device: str, width: int, *, shortens: bool) -> dict[str, Any]:
    """Sums before each step, what AdamW is given, norms, overflows, weights after each step, which methods
    are replaced, and how many waits there were when each backward pass started."""
    engine = engine_of(case, device, width)
    optimizer = engine.optimizer
    before = set(vars(optimizer))
    stream = Stream()
    if case.get("overlap_comm") and device == "cpu":
        optimizer.reduction_stream = stream
    if shortens:
        shorten(optimizer)
    found: dict[str, Any] = {"replaced": sorted(set(vars(optimizer)) - before)}
    lists = ("sums", "given", "norms", "overflows", "weights", "padding", "starts")
    found |= {name: [] for name in lists}
    # ZeRO steps one group at a time.
    engine.basic_optimizer.register_step_pre_hook(
        lambda adamw, *_: found["given"].append(adamw.param_groups[0]["params"][0].grad.clone())
    )
    rows = torch.Generator().manual_seed(dist.get_rank())
    factor = 1 if not engine.gradient_average else dist.get_world_size()
    for step in range(STEPS):
        for _ in range(MICRO_BATCHES):
            row = torch.randn(5, width, generator=rows).to(device, next(engine.module.parameters()).dtype)
            output = engine(row)
            # Behind DeepSpeed's hook, before the gradient of any weight.
            output.register_hook(lambda _: found["starts"].append(stream.waits))
            loss = output.float().square().mean() * factor
            if case.get("bad_step") == step and dist.get_rank() == 0:
                loss = loss * torch.inf
            engine.backward(loss)
            if engine.is_gradient_accumulation_boundary():
                found["sums"] += sums_of(optimizer, found)
            engine.step()
        norm = engine.get_global_grad_norm()
        found["norms"].append(float(norm))
        found["overflows"].append(bool(optimizer.overflow))
        found["weights"].append([one.detach().clone() for one in engine.module.parameters()])
    found["waits"] = stream.waits
    engine.destroy()
    return found


def sums_of(optimizer: Any, found: dict[str, Any]) -> list[Tensor]:
    """This rank's fp32 sums of each group, where they are flat; `padding` gets the largest in padding."""
    groups = getattr(optimizer, "averaged_gradients", {}).values()
    flat = [group for group in groups if hasattr(group, "flat_partition")]
    for group in flat:
        pads = [part.abs().max().item() for part in group if getattr(part, "_zero_padding", False)]
        found["padding"] += pads
    return [group.flat_partition.clone() for group in flat]


def everywhere(value: Any) -> list[Any]:
    """The value of each rank."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def is_equal(first: Any, second: Any) -> bool:
    """Bit for bit, on all ranks."""
    return all(everywhere(all(torch.equal(*pair) for pair in zip(first, second, strict=True))))


def far(first: Tensor, second: Tensor) -> float:
    return float((first - second).norm() / first.norm())


def write_results(folder: Path, device: str) -> int:
    width = 13 if device == "cpu" else 4099
    prepare_environment(on_cpu=device == "cpu")
    import deepspeed

    if device == "cpu":
        vars(torch.cuda)["current_stream"] = Stream
    else:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        # Bitwise equality needs kernels with a fixed order of sums.
        fix_order_of_sums()
    deepspeed.init_distributed(dist_backend="gloo" if device == "cpu" else "nccl", verbose=False)
    results: dict[str, Any] = {}
    kept: dict[str, Any] = {}
    for name, case in CASES.items():
        own, ours = (steps_of(case, device, width, shortens=shortens) for shortens in (False, True))
        kept[name] = ours
        results[name] = {
            "replaced": ours["replaced"],
            "num_sums": len(ours["sums"]),
            "waits": ours["waits"],
            "starts": ours["starts"],
            "padding": everywhere(ours["padding"]),
            "sums": is_equal(own["sums"], ours["sums"]),
            "norms": [own["norms"], ours["norms"]],
            "overflows": [own["overflows"], ours["overflows"]],
            "weights": [is_equal(*pair) for pair in zip(own["weights"], ours["weights"], strict=True)],
            "given": is_equal(own["given"], ours["given"]),
            "far": [far(*pair) for pair in zip(own["given"], ours["given"], strict=True)],
            "stands_still": is_equal(ours["weights"][0], ours["weights"][1]),
        }
    for name in ("zero1", "zero2"):
        averaged = kept["averaged" if name == "zero2" else f"{name}_averaged"]
        results[name]["is_averaged"] = is_equal(kept[name]["given"], averaged["given"])
        results[name]["has_its_norms"] = kept[name]["norms"] == averaged["norms"]
    if dist.get_rank() == 0:
        (folder / "results.json").write_text(json.dumps(results))
    dist.barrier()
    return 0


if __name__ == "__main__":
    sys.exit(write_results(Path(sys.argv[1]), sys.argv[2]))
