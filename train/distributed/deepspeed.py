"""DeepSpeed ZeRO: its configuration from ours, its environment, and parameters that are partitioned over
ranks.

The configuration gives DeepSpeed torch's AdamW, so nothing is compiled by default. Weights are bfloat16 with
fp32 masters in the (partitioned) optimizer, or float32 throughout; never float16. Gradients are communicated
in the dtype of the weights and accumulated in fp32 (`grad_accum_dtype`): over many micro-batches bfloat16
sums would lose small gradients, and the fp32 sums of ZeRO-2 and 3 cost 4 bytes / ranks per weight. deepspeed
is imported only by functions that need it.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from idlm.errors import UserError

if TYPE_CHECKING:
    from idlm.train.config.schema import TrainConfig

STAGES = (0, 1, 2, 3)
SHARDS_WEIGHTS = 3
# Elements: 2 x 400 MB in bfloat16, enough to fill a link and little compared to an optimizer.
BUCKET_ELEMENTS = 200_000_000
LIVE_ELEMENTS = 1_000_000_000
FILLED_BY_TRAINER = (
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "train_batch_size",
    "gradient_clipping",
)
LONE_RANK = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}


def uses_deepspeed(config: TrainConfig) -> bool:
    """Whether this run uses DeepSpeed, by `train.zero_stage` or a configuration file of the user."""
    return config.train.zero_stage is not None or config.train.deepspeed is not None


def zero_stage(config: TrainConfig) -> int | None:
    """The ZeRO stage of the run; None without DeepSpeed."""
    if config.train.deepspeed is not None:
        given = json.loads(Path(config.train.deepspeed).read_text()).get("zero_optimization", {})
        return int(given.get("stage", 0))
    return config.train.zero_stage


def keeps_fp32_masters(config: TrainConfig) -> bool:
    """Whether weights are bfloat16 in the model and fp32 in the optimizer."""
    return uses_deepspeed(config) and (config.train.bf16 or config.model.dtype == "bfloat16")


def deepspeed_config(config: TrainConfig, device_type: str) -> dict[str, Any] | None:
    """DeepSpeed's configuration for `device_type` ("cuda" or "cpu"); None without DeepSpeed.

    Sizes are "auto": the Trainer fills them in from the same settings. A file of the user (`train.deepspeed`)
    gets defaults for the keys that it leaves out.
    """
    loop = config.train
    is_bf16 = keeps_fp32_masters(config)
    base: dict[str, Any] = dict.fromkeys(FILLED_BY_TRAINER, "auto")
    # accelerate would otherwise swap torch's AdamW for one that is compiled on the spot.
    base |= {"bf16": {"enabled": is_bf16}, "zero_force_ds_cpu_optimizer": False}
    base["steps_per_print"] = 10**9
    if loop.deepspeed is not None:
        return base | json.loads(Path(loop.deepspeed).read_text())
    if loop.zero_stage is None:
        return None
    zero: dict[str, Any] = {"stage": loop.zero_stage}
    if loop.zero_stage > 0:
        base["data_types"] = {"grad_accum_dtype": "fp32"}
        zero |= {
            "reduce_scatter": True,
            "overlap_comm": device_type == "cuda",
            "contiguous_gradients": True,
            "reduce_bucket_size": BUCKET_ELEMENTS,
            "allgather_bucket_size": BUCKET_ELEMENTS,
        }
        if loop.offload_optimizer:
            zero["offload_optimizer"] = {"device": "cpu", "pin_memory": device_type == "cuda"}
    if loop.zero_stage == SHARDS_WEIGHTS:
        zero |= {
            "stage3_prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": "auto",
            "stage3_max_live_parameters": LIVE_ELEMENTS,
            "stage3_max_reuse_distance": LIVE_ELEMENTS,
            "stage3_gather_16bit_weights_on_model_save": False,
        }
    return base | {"zero_optimization": zero}


def deepspeed_problems(config: TrainConfig) -> list[str]:
    """Problems of the DeepSpeed settings, as sentences. Does not import DeepSpeed."""
    loop, problems = config.train, []
    if loop.zero_stage is not None and loop.zero_stage not in STAGES:
        problems.append(f"train.zero_stage={loop.zero_stage} is not one of null, 0, 1, 2, 3")
    if loop.zero_stage is not None and loop.deepspeed is not None:
        problems.append("train.zero_stage and train.deepspeed exclude each other: the file names the stage")
    if loop.offload_optimizer and loop.zero_stage not in (1, 2, 3):
        problems.append("train.offload_optimizer=true needs train.zero_stage=1, 2 or 3")
    if loop.deepspeed is not None:
        problems += _file_problems(Path(loop.deepspeed), config)
    return problems


def _file_problems(path: Path, config: TrainConfig) -> list[str]:
    if not path.is_file():
        return [f"train.deepspeed={path} is not a file"]
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        return [f"train.deepspeed={path} is not JSON: {error}"]
    if not isinstance(given, dict) or not isinstance(given.get("zero_optimization", {}), dict):
        return [f"train.deepspeed={path} is not a DeepSpeed configuration: an object is expected"]
    problems = []
    if _enabled(given, "fp16"):
        problems.append(f"{path}: fp16 is not supported, its range is too small for this loss; use bf16")
    is_bf16 = keeps_fp32_masters(config)
    if "bf16" in given and _enabled(given, "bf16") != is_bf16:
        problems.append(f"{path}: bf16.enabled contradicts train.bf16 and model.dtype, which say {is_bf16}")
    ours = {
        "train_micro_batch_size_per_gpu": ("train.batch_size", config.train.batch_size),
        "gradient_accumulation_steps": ("train.accumulation", config.train.accumulation),
        "gradient_clipping": ("train.max_grad_norm", config.train.max_grad_norm),
    }
    for name, (key, value) in ours.items():
        if given.get(name, "auto") not in ("auto", value):
            problems.append(f'{path}: {name}={given[name]} contradicts {key}={value}; write "auto"')
    for name in ("scheduler", "tensor_parallel", "sequence_parallel_size"):
        if name in given:
            problems.append(f"{path}: {name!r} would replace what idlm does itself; remove it")
    return problems


def _enabled(given: dict[str, Any], section: str) -> bool:
    value = given.get(section)
    return isinstance(value, dict) and bool(value.get("enabled"))


def prepare_environment(config: TrainConfig) -> None:
    """Set the environment that DeepSpeed reads when it is imported: a device, and a rank even for one
    process.

    Call it before TrainingArguments is created. Without it plain `python` asks for mpi4py, and the first run
    on a CPU compiles an operation for a minute. UserError IDLM-0511 where DeepSpeed cannot be imported.
    """
    on_cpu = config.train.device == "cpu" or not torch.cuda.is_available()
    if on_cpu:
        # accelerate imports DeepSpeed where it is installed, which warns of the missing GPU without this.
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    if not uses_deepspeed(config):
        return
    if "RANK" not in os.environ:
        os.environ.update(LONE_RANK)
        os.environ["MASTER_PORT"] = str(_free_port())
    try:
        import deepspeed.ops
    except ImportError as error:
        raise UserError(
            "IDLM-0511",
            f"DeepSpeed cannot be imported: {error}",
            fix="pip install 'idlm[gpu]', or train.zero_stage=null on one GPU",
        ) from error
    # DeepSpeed's use of torch's older names concerns no user of ours.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    if on_cpu:
        vars(deepspeed.ops)["__compatible_ops__"] = {"deepspeed_shm_comm": False}


def open_communication(config: TrainConfig) -> None:
    """Give DeepSpeed the open process group: ZeRO-3 asks for its ranks while weights are loaded."""
    if uses_deepspeed(config):
        import deepspeed

        deepspeed.init_distributed(dist_backend=torch.distributed.get_backend(), verbose=False)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def is_partitioned(parameter: Tensor) -> bool:
    """Whether `parameter` is a ZeRO-3 placeholder whose values are partitioned over all ranks."""
    return hasattr(parameter, "ds_id")


def num_elements(parameter: Tensor) -> int:
    """Elements of the whole parameter, partitioned or not."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def whole_shape(parameter: Tensor) -> torch.Size:
    """The shape of the whole parameter, partitioned or not."""
    return torch.Size(getattr(parameter, "ds_shape", parameter.shape))


def num_parameters(model: nn.Module) -> int:
    """Elements of all parameters of `model`, tied ones once."""
    return sum(num_elements(parameter) for parameter in model.parameters())


def local_part(parameter: Tensor) -> Tensor:
    """The values of `parameter` that this rank holds: all of them without ZeRO-3."""
    part: Tensor = getattr(parameter, "ds_tensor", parameter)
    return part


@contextlib.contextmanager
def gathered(parameters: Iterable[Tensor], *, writes: bool = False) -> Iterator[None]:
    """Inside, `parameters` are whole on every rank; with `writes`, changes by rank 0 are kept on all ranks.

    Collective. Does nothing for parameters that are not partitioned.
    """
    parts = [parameter for parameter in parameters if is_partitioned(parameter)]
    if not parts:
        yield
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters(parts, modifier_rank=0 if writes else None):
        yield


@contextlib.contextmanager
def gathering_forward(model: nn.Module) -> Iterator[None]:
    """Inside, a forward pass of a ZeRO-3 model that no engine wraps yet gathers one module at a time."""
    handles = []
    open_contexts: dict[nn.Module, contextlib.AbstractContextManager[None]] = {}

    def enter(module: nn.Module, args: Any) -> None:
        open_contexts[module] = gathered(module.parameters(recurse=False))
        open_contexts[module].__enter__()

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        open_contexts.pop(module).__exit__(None, None, None)

    for module in model.modules():
        if any(is_partitioned(parameter) for parameter in module.parameters(recurse=False)):
            handles += [module.register_forward_pre_hook(enter), module.register_forward_hook(leave)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def whole_weights(
    model: nn.Module, *, wanted: Callable[[str], bool] = lambda name: True
) -> dict[str, Tensor] | None:
    """The state dict of `model` with whole tensors, on rank 0; None on other ranks. Collective.

    Under ZeRO-3 one parameter at a time is gathered and copied to the host; otherwise nothing is copied.
    Names of tied parameters share one tensor, as in `state_dict()`.
    """
    from idlm.train.distributed.collectives import is_distributed

    keeps = not is_distributed() or torch.distributed.get_rank() == 0
    weights: dict[str, Tensor] = {}
    copies: dict[int, Tensor] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if not wanted(name):
            continue
        if not is_partitioned(value):
            weights[name] = value.detach()
            continue
        if id(value) not in copies:
            with gathered([value]):
                copies[id(value)] = value.detach().cpu().clone() if keeps else torch.empty(0)
        weights[name] = copies[id(value)]
    return weights if keeps else None
