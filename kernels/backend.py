"""Where kernels run, launch options that depend on the device or the interpreter, the device's memory, and
products of rows by torch's library, none of which reaches another. R rows, D input width, E output width."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, MutableMapping
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

HOPPER = (9, 0)
KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
FP8 = torch.float8_e4m3fn
LOG2_E = 1.4426950408889634
TILE_BYTES = 64
"""Of a row in a tile register of AMX."""
FEW_ROWS, LARGE_WEIGHT, PACKED_BYTES = 32, 2**18, 2**31
"""Rows and elements of a weight from which a packed copy is used, and the bytes of all copies."""
INTERPRETED_MULTIPROCESSORS = 6
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether Triton interprets kernels on a CPU, which it decides when they are imported."""
_packed: MutableMapping[Tensor, tuple[int, Tensor]] = WeakIdKeyDictionary()
"""Copies of weights, with the version of the weight that they are copies of."""
_only_compiled: ContextVar[bool] = ContextVar("only_compiled", default=False)


def runs_kernels(x: Tensor) -> bool:
    """Whether kernels compute ops on this tensor: on a GPU, or in Triton's interpreter."""
    return INTERPRETED or has_kernels(x.device)


def computes(x: Tensor) -> bool:
    """Whether kernels compute ops on this tensor, whose dtype they support."""
    return runs_kernels(x) and x.dtype in KERNEL_DTYPES


def has_kernels(device: torch.device) -> bool:
    """Whether it is a GPU. While kernels are `only_compiled`, tensors without memory (meta) count too."""
    return device.type == "cuda" or (device.type == "meta" and _only_compiled.get())


@contextlib.contextmanager
def only_compiled() -> Iterator[None]:
    """Within it the caller sees to it that Triton compiles kernels and launches none."""
    token = _only_compiled.set(True)
    try:
        yield
    finally:
        _only_compiled.reset(token)


def gpu_of(device: torch.device) -> torch.device:
    """The device, or of the meta device the GPU that kernels are compiled for."""
    return torch.device("cuda") if device.type == "meta" else device


@cache
def has_pdl(device: torch.device) -> bool:
    """Whether a kernel can launch before the kernel that it waits for has ended (programmatic dependent
    launch), which needs a GPU from Hopper on and is unknown to Triton's interpreter."""
    device = gpu_of(device)
    return device.type == "cuda" and not INTERPRETED and torch.cuda.get_device_capability(device) >= HOPPER


@cache
def has_gluon(device: torch.device) -> bool:
    """Whether Gluon, which is experimental, has a version that the tests compile, and the GPU is a Hopper."""
    if device.type != "cuda" or INTERPRETED:
        return False
    import triton

    known = triton.__version__.split(".")[:2] in (["3", "6"], ["3", "7"])
    return known and torch.cuda.get_device_capability(device) == HOPPER


@cache
def num_multiprocessors(device: torch.device) -> int:
    """Multiprocessors of the device, or a small number in the interpreter."""
    device = gpu_of(device)
    if device.type != "cuda":
        return INTERPRETED_MULTIPROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def memory_bytes(device: torch.device) -> tuple[int, int]:
    """(free, total) bytes of `device`; the memory of a CPU counts as free."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return free, total
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return total, total


def rounds_as_written() -> dict[str, Any]:
    """Launch options of a kernel that rounds between a product and a sum: Triton's compiler would otherwise
    fuse both into one operation with one rounding. With it a sum of products over the lanes of a warp has
    other bits in each lane, since each rounds all products but its own. The interpreter does not have the
    option."""
    return {} if INTERPRETED else {"enable_fp_fusion": False}


def pdl_options(pdl: bool) -> dict[str, Any]:
    """Arguments of a kernel with or without dependent launch, which the interpreter does not have."""
    return {"PDL": True, "launch_pdl": True} if pdl and not INTERPRETED else {"PDL": False}


def read_slots(cache_SKH: torch.Tensor, slots_X: torch.Tensor) -> torch.Tensor:
    """Slots [*X, K, H] of a cache, in its dtype."""
    if cache_SKH.dtype != FP8:
        return cache_SKH[slots_X]
    # By bytes: not every device gathers eight-bit floats.
    return cache_SKH.view(torch.uint8)[slots_X].view(FP8)


def gathered(
    cache_SKH: torch.Tensor, slots_X: torch.Tensor, scale_K: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """Slots [X, K, H] of a cache; those of eight bits are scaled, and in `dtype`."""
    if cache_SKH.dtype != FP8:
        return cache_SKH.index_select(0, slots_X)
    cached_XKH = read_slots(cache_SKH, slots_X)
    if scale_K is None:
        return cached_XKH.to(dtype)
    return (cached_XKH.to(torch.float32) * scale_K[:, None]).to(dtype)


@contextlib.contextmanager
def one_thread(*, is_few: bool) -> Iterator[None]:
    """Within it products of few rows on a CPU wake no threads, which takes longer than small ones do: 2 rows
    by 72 x 576 take 10 us on one thread, and 50 with two that sleep (an AMD with AVX2)."""
    if not is_few:
        yield
        return
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def library_linear(
    x_RD: Tensor,
    weight_ED: Tensor,
    *,
    bias_E: Tensor | None = None,
    out_RE: Tensor | None = None,
    of_model: bool = False,
) -> Tensor:
    """x W^T (+ bias) by torch, [R, E]; with `out_RE` (contiguous) nothing else is allocated on a GPU.
    `of_model`: the weight is a tensor that a model holds, not one that is made for this product.

    A row that is not finite changes no other. On a CPU, 16-bit rows of odd widths are looked at for that, and
    copied if they have gaps or one is not finite."""
    if _reads_the_next_row(x_RD):
        x_RD = x_RD.contiguous()
        is_broken_R1 = ~x_RD.isfinite().all(dim=1, keepdim=True)
        if is_broken_R1.any():
            whole_RE = _product(x_RD.masked_fill(is_broken_R1, 0), weight_ED, bias_E, out_RE)
            return whole_RE.masked_fill_(is_broken_R1, torch.nan)
    packed = _packed_weight(x_RD, weight_ED) if of_model else None
    if packed is not None:
        y_RE = torch.ops.mkldnn._linear_pointwise(x_RD.contiguous(), packed, bias_E, "none", [], "")
        return y_RE if out_RE is None else out_RE.copy_(y_RE)
    return _product(x_RD, weight_ED, bias_E, out_RE)


def _reads_the_next_row(x_RD: Tensor) -> bool:
    """Whether the library may fill the last tile of a row with what follows in memory, which it multiplies by
    zero: a NaN there is NaN here too. oneDNN does so with bfloat16 on AMX."""
    return x_RD.device.type == "cpu" and x_RD.itemsize == 2 and x_RD.shape[1] * 2 % TILE_BYTES != 0


def _packed_weight(x_RD: Tensor, weight_ED: Tensor) -> Tensor | None:
    """oneDNN's copy of a large weight in an order of its own, made for the first few rows and kept while the
    weight lives; None where the library multiplies by the weight itself.

    On AMD's CPUs MKL reads the weights about once a row. With the copy a product of 8 rows takes about as
    long as one of 1: 0.5 ms in place of 1.0 for 3,120 x 576 (two cores with AVX2)."""
    is_few = len(x_RD) <= FEW_ROWS and weight_ED.numel() >= LARGE_WEIGHT and x_RD.dtype == torch.float32
    if not (is_few and x_RD.device.type == "cpu" and _packs_weights()):
        return None
    if torch.is_grad_enabled() and (x_RD.requires_grad or weight_ED.requires_grad):
        return None
    version = 0 if weight_ED.is_inference() else weight_ED._version
    found = _packed.get(weight_ED)
    if found is None or found[0] != version:
        if weight_ED.nbytes + sum(weight.nbytes for weight in _packed) > PACKED_BYTES:
            return None
        found = version, torch.ops.mkldnn._reorder_linear_weight(weight_ED.detach(), FEW_ROWS)
        _packed[weight_ED] = found
    return found[1]


@cache
def _packs_weights() -> bool:
    """Whether the CPU is one that gains, an AMD with AVX2. On Intel's, MKL in its strict mode gives a row the
    same bits in any number of rows."""
    is_avx2 = torch.backends.cpu.get_cpu_capability() == "AVX2" and torch.backends.mkldnn.is_available()
    return is_avx2 and "AuthenticAMD" in Path("/proc/cpuinfo").read_text()


def _product(x_RD: Tensor, weight_ED: Tensor, bias_E: Tensor | None, out_RE: Tensor | None) -> Tensor:
    if out_RE is None:
        return F.linear(x_RD, weight_ED, bias_E)
    if bias_E is None:
        return torch.mm(x_RD, weight_ED.T, out=out_RE)
    return torch.addmm(bias_E, x_RD, weight_ED.T, out=out_RE)
