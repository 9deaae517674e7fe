"""Whether a run uses DeepSpeed ZeRO, and parameters that ZeRO-3 partitions over ranks.

Every run calls these functions; `deepspeed_settings.py` is read only by runs with DeepSpeed. Functions import
deepspeed only where parameters are partitioned.

What libraries print and log of their own accord goes through our log: routine at DEBUG, warnings as such.
`IDLM_LOG_LEVEL=DEBUG` shows all of it."""

from __future__ import annotations

import atexit
import contextlib
import functools
import io
import json
import logging
import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch import distributed as dist

from idlm.train.config.schema import LoopConfig, TrainConfig
from idlm.train.distributed.collectives import is_distributed

SHARDS_WEIGHTS = 3


def uses_deepspeed(loop: LoopConfig) -> bool:
    """Whether this run uses DeepSpeed, by `train.zero_stage` or a configuration file of the user."""
    return loop.zero_stage is not None or loop.deepspeed is not None


def zero_stage(loop: LoopConfig) -> int | None:
    if loop.deepspeed is not None:
        given = json.loads(Path(loop.deepspeed).read_text()).get("zero_optimization", {})
        return int(given.get("stage", 0))
    return loop.zero_stage


def has_fp32_masters(config: TrainConfig) -> bool:
    """Whether weights are bfloat16 in the model and fp32 in the optimizer."""
    return uses_deepspeed(config.train) and (config.train.bf16 or config.model.dtype == "bfloat16")


def is_partitioned(parameter: Tensor) -> bool:
    """Whether `parameter` is a ZeRO-3 placeholder whose values are partitioned over all ranks."""
    return hasattr(parameter, "ds_id")


def num_elements(parameter: Tensor) -> int:
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def whole_shape(parameter: Tensor) -> torch.Size:
    """The shape of the whole parameter, partitioned or not."""
    return torch.Size(getattr(parameter, "ds_shape", parameter.shape))


def num_parameters(model: nn.Module) -> int:
    """Elements of all parameters of `model`, tied ones once."""
    return sum(num_elements(parameter) for parameter in model.parameters())


def num_trained_parameters(model: nn.Module) -> int:
    return sum(num_elements(parameter) for parameter in model.parameters() if parameter.requires_grad)


def local_part(parameter: Tensor) -> Tensor:
    """The values of `parameter` that this rank holds: all of them without ZeRO-3."""
    part: Tensor = getattr(parameter, "ds_tensor", parameter)
    return part


@contextlib.contextmanager
def gathered(parameters: Iterable[Tensor], *, writes: bool = False) -> Iterator[None]:
    """Inside, `parameters` are whole on every rank; with `writes`, changes by rank 0 are copied to all ranks.

    Collective. Does nothing for parameters that are not partitioned."""
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
    Names of tied parameters share one tensor, as in `state_dict()`."""
    is_writer = not is_distributed() or torch.distributed.get_rank() == 0
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
                copies[id(value)] = value.detach().cpu().clone() if is_writer else torch.empty(0)
        weights[name] = copies[id(value)]
    return weights if is_writer else None


T = TypeVar("T")
log = logging.getLogger(__name__)
LOGGERS = ("DeepSpeed", "accelerate.accelerator")
ROUTINE = (
    r"(\[RANK \d+\] )?Gradient accumulation steps mismatch",
    r"TensorFloat32 tensor cores for float32",
    r"barrier\(\): using the device under current context",
    r"Setting (ds_)?accelerator to",
    r"OMP_NUM_THREADS/MKL_NUM_THREADS unset",
)
"""Beginnings of messages at the level of a warning about what a library does, or recommend what is decided
by the options `model.dtype` and `train.bf16`."""


def _forward(record: logging.LogRecord) -> bool:
    """Filter of a library's logger: our handlers get the record in place of the library's own."""
    if any(re.match(pattern, record.getMessage()) for pattern in ROUTINE):
        record.levelno, record.levelname = logging.DEBUG, "DEBUG"
    ours = logging.getLogger("idlm")
    if ours.isEnabledFor(record.levelno):
        ours.handle(record)
    return False


def route_library_output() -> None:
    """Install the filters before the libraries are imported, and the end of the process group."""
    for name in LOGGERS:
        # A filter or a function that is there already is not added again.
        logging.getLogger(name).addFilter(_forward)
    atexit.unregister(_close_process_group)
    atexit.register(_close_process_group)
    for pattern in ROUTINE:
        warnings.filterwarnings("ignore", message=pattern)


def printing_to_log(call: Callable[..., T]) -> Callable[..., T]:
    """`call`, whose prints to standard output are logged."""

    @functools.wraps(call)
    def logged(*args: Any, **kwargs: Any) -> T:
        text = io.StringIO()
        try:
            with contextlib.redirect_stdout(text):
                return call(*args, **kwargs)
        finally:
            for line in text.getvalue().splitlines():
                log.debug("%s", line)

    return logged


def _close_process_group() -> None:
    """NCCL warns of a group that is still open when its process ends."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
