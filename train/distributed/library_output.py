"""What libraries print and log of their own accord, through our log: routine at DEBUG, warnings as such.

`IDLM_LOG_LEVEL=DEBUG` shows all of it."""

from __future__ import annotations

import atexit
import contextlib
import functools
import io
import logging
import re
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

from torch import distributed as dist

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
"""Beginnings of messages at the level of a warning that say what a library does, or recommend what is decided
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
