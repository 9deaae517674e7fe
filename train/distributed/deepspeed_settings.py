"""DeepSpeed's configuration from ours or from a file of the user, its problems, and the environment that it
needs.

The configuration gives DeepSpeed torch's AdamW, so nothing is compiled by default. Weights are bfloat16 with
fp32 masters in the (partitioned) optimizer, or float32 throughout; never float16. Gradients are communicated
in the dtype of the weights and accumulated in fp32 (`grad_accum_dtype`): over many micro-batches bfloat16
sums would lose small gradients, and the fp32 sums of ZeRO-2 and 3 cost 4 bytes / ranks per weight. deepspeed
is imported only by functions that need it.

Files of other trainers (`train.deepspeed`) have "auto" where the trainer has the value. Here that is the
value of our settings; an optimizer or a schedule that is "auto" is ours, and float16 that is off or "auto" is
off. A value that is given must be that of our settings where there is one."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.elastic.utils.distributed import get_free_port

from idlm.config.project import install_command
from idlm.errors import UserError
from idlm.log import num_processes
from idlm.train.config.schema import TrainConfig
from idlm.train.distributed.deepspeed import SHARDS_WEIGHTS, has_fp32_masters, num_elements

# Elements: 2 x 400 MB in bfloat16, enough to fill a link and little compared to an optimizer.
BUCKET_ELEMENTS = 200_000_000
DEEPSPEED_BUCKET_ELEMENTS = 500_000_000
"""What DeepSpeed takes where a file of the user has no value."""
LIVE_ELEMENTS = 1_000_000_000
LONE_RANK = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
AUTO = "auto"
STAGES = (0, 1, 2, 3)
FILLED_BY_TRAINER = (
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "train_batch_size",
    "gradient_clipping",
)
BY_WIDTH = ("stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
"""Of `zero_optimization`: transformers takes them from the model's width."""
REPLACED = ("optimizer", "scheduler", "fp16", "amp")
"""Sections that our settings replace once nothing in them contradicts."""
ADAMW = ("adamw", "adam", "fusedadam", "deepspeedcpuadam")
FIXED_SCHEDULE = {"warmup_min_lr": 0, "last_batch_iteration": -1}
ADAM_EPSILON, ADAM_BETA1 = 1e-8, 0.9
"""Of transformers' AdamW, which training uses."""


def deepspeed_config(config: TrainConfig, device_type: str) -> dict[str, Any]:
    """DeepSpeed's configuration for `device_type` ("cuda" or "cpu").

    Sizes are "auto": the Trainer fills them in from the same settings. A file of the user (`train.deepspeed`)
    gets defaults for the keys that it leaves out."""
    if config.train.deepspeed is None:
        return _own_settings(config, config.train.zero_stage, device_type)
    given = json.loads(Path(config.train.deepspeed).read_text(encoding="utf-8"))
    ours = _own_settings(config, given.get("zero_optimization", {}).get("stage", 0), device_type)
    # With a file gradients are added up and averaged as DeepSpeed does.
    for name in ("data_types", "gradient_allreduce_op"):
        ours.pop(name, None)
    return fill(given, ours)


def _own_settings(config: TrainConfig, stage: int | None, device_type: str) -> dict[str, Any]:
    loop = config.train
    base: dict[str, Any] = dict.fromkeys(FILLED_BY_TRAINER, "auto")
    # accelerate would otherwise swap torch's AdamW for one that is compiled on the spot.
    base |= {"bf16": {"enabled": has_fp32_masters(config)}, "zero_force_ds_cpu_optimizer": False}
    base["steps_per_print"] = 10**9
    zero: dict[str, Any] = {"stage": stage}
    if stage:
        base["data_types"] = {"grad_accum_dtype": "fp32"}
        if stage != SHARDS_WEIGHTS:
            # No pass over all gradients divides them: `IdlmTrainer._prepare_engine` takes that off the loss.
            base["gradient_allreduce_op"] = "sum"
        zero |= {
            # With true, DeepSpeed copies the slices of a bucket into another tensor, reduces that for all
            # ranks too, and copies back. ZeRO-3 scatters in any case.
            "reduce_scatter": stage == SHARDS_WEIGHTS,
            "overlap_comm": device_type == "cuda",
            "contiguous_gradients": True,
            "reduce_bucket_size": BUCKET_ELEMENTS,
            "allgather_bucket_size": BUCKET_ELEMENTS,
        }
        if loop.offload_optimizer:
            zero["offload_optimizer"] = {"device": "cpu", "pin_memory": device_type == "cuda"}
    if stage == SHARDS_WEIGHTS:
        zero |= {
            "stage3_prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": "auto",
            "stage3_max_live_parameters": LIVE_ELEMENTS,
            "stage3_max_reuse_distance": LIVE_ELEMENTS,
            "stage3_gather_16bit_weights_on_model_save": False,
        }
    return base | {"zero_optimization": zero}


def hold_gradients(settings: dict[str, Any], parameters: Iterable[Tensor]) -> None:
    """Make buckets of ZeRO-1 and 2 in `settings` hold the largest gradient, if they overlap communication.

    DeepSpeed 0.19.8 reduces a larger gradient where it lies, on a stream of its own, and frees it at once.
    Later kernels then write into it: the head and the embedding of Qwen3-8B got wrong or infinite gradients.
    """
    zero = settings.get("zero_optimization", {})
    if zero.get("stage") in (1, 2) and zero.get("overlap_comm"):
        given = zero.get("reduce_bucket_size", DEEPSPEED_BUCKET_ELEMENTS)
        sizes = [num_elements(one) for one in parameters if one.requires_grad]
        # "auto" would be the square of the model's width.
        zero["reduce_bucket_size"] = max(BUCKET_ELEMENTS if given == "auto" else int(given), *sizes)


def deepspeed_problems(config: TrainConfig) -> Iterator[str]:
    loop = config.train
    if loop.zero_stage is not None and loop.zero_stage not in STAGES:
        yield f"train.zero_stage={loop.zero_stage} is not one of null, 0, 1, 2, 3"
    if loop.zero_stage is not None and loop.deepspeed is not None:
        yield "train.zero_stage and train.deepspeed exclude each other: the file names the stage"
    if loop.deepspeed is not None:
        path = Path(loop.deepspeed)
        given = read_settings(path)
        if isinstance(given, str):
            yield given
            return
        yield from (f"{path}: {problem}" for problem in settings_problems(given, config))


def prepare_environment(*, on_cpu: bool) -> None:
    """Set the environment that DeepSpeed reads when it is imported: a device, and a rank even for one
    process.

    Call it before TrainingArguments is created. Without it plain `python` needs mpi4py, and the first run
    on a CPU compiles an operation for a minute. UserError IDLM-0511 where DeepSpeed cannot be imported."""
    if on_cpu:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    if "RANK" not in os.environ:
        os.environ.update(LONE_RANK)
        os.environ["MASTER_PORT"] = str(get_free_port())
    try:
        import deepspeed.ops
    except ImportError as error:
        raise UserError(
            "IDLM-0511",
            f"DeepSpeed cannot be imported: {error}",
            fix=f"install the extra gpu: {install_command('gpu')}; or give train.zero_stage=null on one GPU",
        ) from error
    # DeepSpeed's use of torch's older names concerns no user of ours.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    if on_cpu:
        vars(deepspeed.ops)["__compatible_ops__"] = {"deepspeed_shm_comm": False}


def open_communication() -> None:
    """Give DeepSpeed the open process group: ZeRO-3 reads its ranks while weights are loaded."""
    import deepspeed

    dist = torch.distributed
    deepspeed.init_distributed(dist_backend=dist.get_backend(), verbose=False)
    if dist.get_world_size() == 1 and dist.get_backend() == "nccl":
        # A barrier before any other operation makes NCCL guess the device, with a warning.
        dist.all_reduce(torch.zeros(1, device="cuda"))


def read_settings(path: Path) -> dict[str, Any] | str:
    """The parsed file of `train.deepspeed`, or the problem that makes it unusable."""
    if not path.is_file():
        return f"train.deepspeed={path} is not a file"
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        return f"train.deepspeed={path} is not JSON: {error}"
    sections = ("zero_optimization", "bf16", *REPLACED)
    if not isinstance(given, dict) or any(not isinstance(given.get(name, {}), dict) for name in sections):
        return f"train.deepspeed={path} is not a DeepSpeed configuration: an object is expected"
    return given


def fill(given: Mapping[str, Any], ours: Mapping[str, Any]) -> dict[str, Any]:
    """`given` over `ours`, the settings of a run of the same stage. What is "auto" is that of ours, else what
    transformers takes from the model's width, else DeepSpeed's default."""
    filled = dict(ours)
    filled |= {name: value for name, value in given.items() if name not in REPLACED and value != AUTO}
    filled["bf16"] = dict(given.get("bf16", {})) | ours["bf16"]
    zero = dict(given.get("zero_optimization", {}))
    offload = {"device": "none", "pin_memory": False} | ours["zero_optimization"].get("offload_optimizer", {})
    for name, value in zero.items():
        if isinstance(value, dict):
            zero[name] = {key: offload.get(key, one) if one == AUTO else one for key, one in value.items()}
        elif value == AUTO:
            zero[name] = ours["zero_optimization"].get(name, AUTO)
    filled["zero_optimization"] = zero
    kept = (*FILLED_BY_TRAINER, *(BY_WIDTH if zero.get("stage") == SHARDS_WEIGHTS else ()))
    return _without_autos(filled, kept)


def _without_autos(values: Mapping[str, Any], kept: tuple[str, ...]) -> dict[str, Any]:
    """`values` without those that are "auto", at any depth, except under the names in `kept`."""
    return {
        name: _without_autos(value, kept) if isinstance(value, dict) else value
        for name, value in values.items()
        if value != AUTO or name in kept
    }


def settings_problems(given: Mapping[str, Any], config: TrainConfig) -> Iterator[str]:
    """What contradicts our settings or is not supported."""
    if _enabled(given, "fp16") is True or _enabled(given, "amp") is True:
        yield "fp16 is not supported, its range is too small for this loss; use bf16"
    is_bf16 = has_fp32_masters(config)
    if _enabled(given, "bf16") not in (None, AUTO, is_bf16):
        yield (
            f"bf16.enabled={json.dumps(_enabled(given, 'bf16'))} contradicts train.bf16 and model.dtype, "
            f'which have {json.dumps(is_bf16)}; write "auto"'
        )
    stage = given.get("zero_optimization", {}).get("stage", 0)
    if isinstance(stage, bool) or stage not in STAGES:
        yield f"zero_optimization.stage={json.dumps(stage)} is not one of 0, 1, 2, 3"
    for name, key, value in _known(config):
        stated = _value(given, name)
        if stated not in (None, AUTO, value):
            yield f'{name}={json.dumps(stated)} contradicts {key}={value}; write "auto"'
    yield from _replaced(given)


def _replaced(given: Mapping[str, Any]) -> Iterator[str]:
    """Sections for which training has something of its own."""
    optimizer, schedule = given.get("optimizer", {}), given.get("scheduler", {})
    kind = str(optimizer.get("type", "AdamW"))
    if kind.lower() not in ADAMW or optimizer.get("params", {}).get("adam_w_mode") is False:
        yield f"optimizer.type={kind} is not the AdamW that idlm trains with; remove the section"
    for name, value in schedule.get("params", {}).items():
        is_text = isinstance(value, str)
        if not is_text and FIXED_SCHEDULE.get(name) != value and name != "warmup_max_lr":
            yield (
                f"scheduler.params.{name}={json.dumps(value)} would not be used: train.schedule, "
                'train.warmup and train.decay are; write "auto", or remove the section'
            )
    for name in ("tensor_parallel", "sequence_parallel_size"):
        if name in given:
            yield f"{name!r} would replace what idlm does itself; remove it"


def _known(config: TrainConfig) -> Iterator[tuple[str, str, Any]]:
    """(name in the file, key of ours, its value)."""
    loop = config.train
    size = config.plan.num_gpus if config.dry_run and config.plan.num_gpus else num_processes()
    accumulation, rows = loop.accumulation, loop.batch_size * size
    if loop.global_batch is not None:
        accumulation = max(1, loop.global_batch // max(1, rows))
    yield "train_micro_batch_size_per_gpu", "train.batch_size", loop.batch_size
    yield "gradient_accumulation_steps", "train.accumulation", accumulation
    yield "train_batch_size", f"train.batch_size x accumulation x {size} processes", rows * accumulation
    yield "gradient_clipping", "train.max_grad_norm", loop.max_grad_norm
    yield "optimizer.params.lr", "train.learning_rate", loop.learning_rate
    yield "optimizer.params.betas", "betas", [ADAM_BETA1, loop.adam_beta2]
    yield "optimizer.params.eps", "eps", ADAM_EPSILON
    yield "optimizer.params.weight_decay", "train.weight_decay", loop.weight_decay
    yield "scheduler.params.warmup_max_lr", "train.learning_rate", loop.learning_rate


def _value(given: Mapping[str, Any], name: str) -> Any:
    """The value under a name with dots; None where there is none."""
    value: Any = given
    for part in name.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _enabled(given: Mapping[str, Any], section: str) -> Any:
    """The `enabled` of a section: true, false, "auto" or None."""
    return given[section].get("enabled", False) if section in given else None
