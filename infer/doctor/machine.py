"""The machine: GPU and driver, compiler, kernels that run here, folders, shared memory, port."""

from __future__ import annotations

import ctypes
import os
import shutil
import socket
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from idlm.config.project import install_command, requirements
from idlm.infer.doctor.installation import NOTE, OK, PROBLEM, Finding

MIN_FREE_BYTES = 1 << 28
MIN_SHARED_BYTES = 1 << 30
"""NCCL takes tens of MB for each pair of ranks; containers have 64 MB without an option."""
NO_DEVICE = 100


def driver() -> tuple[int, int, int] | None:
    """CUDA version (major, minor) of the NVIDIA driver, and the status of its start; None without one."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    number = ctypes.c_int()
    library.cuDriverGetVersion(ctypes.byref(number))
    return number.value // 1000, number.value % 1000 // 10, int(library.cuInit(0))


def gpu() -> Finding:
    """The GPUs that torch sees, or why it sees none."""
    built, known = torch.version.cuda, driver()
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        version = "CUDA {}.{}".format(*known) if known else "an unknown CUDA"
        return Finding(OK, "GPU", f"{', '.join(names)}; driver for {version}, torch for CUDA {built}")
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if known is not None and hidden in ("", "-1"):
        return Finding(NOTE, "GPU", f"CUDA_VISIBLE_DEVICES={hidden!r} hides all GPUs", "unset it")
    if known is None or known[2] == NO_DEVICE:
        return Finding(OK, "GPU", "none: idlm runs on the CPU")
    major, minor, status = known
    package = next(f"{one.name}{one.specifier}" for one in requirements()[""] if one.name == "torch")
    index = f"https://download.pytorch.org/whl/{'cu130' if major >= 13 else 'cu128'}"
    other_torch = f"pip install --force-reinstall '{package}' --index-url {index}"
    if built is None:
        text = f"a driver for CUDA {major}.{minor} is there, but torch {torch.__version__} has no CUDA"
        fix = other_torch if major >= 12 else f"install a newer NVIDIA driver, then {other_torch}"
        return Finding(PROBLEM, "GPU", text, fix)
    if major < int(built.partition(".")[0]):
        fix = "install a newer NVIDIA driver" + f", or {other_torch}" * (major >= 12)
        return Finding(PROBLEM, "GPU", f"the driver is for CUDA {major}.{minor}, torch for {built}", fix)
    text = f"torch sees none, and the driver (CUDA {major}.{minor}) starts with status {status}"
    fix = "see whether `nvidia-smi` works; in a container start it with --gpus all"
    return Finding(PROBLEM, "GPU", text, fix)


def compilers() -> Iterator[Finding]:
    """What Triton needs to compile and launch kernels on a GPU."""
    try:
        import triton
    except ImportError as error:
        yield Finding(PROBLEM, "triton", f"cannot be imported: {error}", install_command("gpu"))
        return
    names = [os.environ.get("CC", ""), "cc", "gcc", "clang"]
    compiler = next((path for name in names if name and (path := shutil.which(name))), None)
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if compiler is None:
        text, fix = "no C compiler", "apt install gcc, or set CC to a C compiler"
        yield Finding(PROBLEM, "compiler", f"{text}, which Triton needs to launch kernels", fix)
    elif not header.is_file():
        fix = "apt install python3-dev, of this Python's version"
        yield Finding(PROBLEM, "compiler", f"there is no {header}, which Triton needs", fix)
    else:
        yield Finding(OK, "compiler", f"{compiler} for Triton {triton.__version__}")


def kernels(device: torch.device) -> Iterator[Finding]:
    """What computes attention, linear layers, sampling and steps, and why."""
    from idlm.kernels.backend import has_gluon
    from idlm.kernels.paged_attention import problems
    from idlm.kernels.paged_attention.op import AUTO
    from idlm.kernels.paged_attention.types import HeadShape
    from idlm.train.model.attention import choose_attention

    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    shape = HeadShape(num_heads=32, num_kv_heads=8, head_dim=128, dtype=dtype)
    refused = {name: problems(name, shape, device=device) for name in AUTO[device.type]}
    chosen = next(name for name, found in refused.items() if not found)
    why = "; ".join(f"{name}: {', '.join(found)}" for name, found in refused.items() if found)
    yield Finding(OK, "attention", f"{chosen}, for {dtype} on {device.type}" + f" ({why})" * bool(why))
    linears = sampling = "torch: kernels need a GPU"
    if chosen == "triton":
        few = "Gluon" if has_gluon(device) else "Triton (Gluon needs a Hopper GPU and Triton 3.6 or 3.7)"
        linears, sampling = f"{few} for few rows, cuBLAS for many", "Triton"
    yield from (Finding(OK, "linears", linears), Finding(OK, "sampling", sampling))
    has_graphs = device.type == "cuda" and chosen == "triton"
    trains = choose_attention("auto", device, is_16_bit=device.type == "cuda")
    yield Finding(OK, "training attention", f"{trains}, for {dtype} (model.attention=auto)")
    yield Finding(OK, "graphs", "CUDA graphs" if has_graphs else "none: they need attention=triton on a GPU")


def folders() -> Iterator[Finding]:
    """Folders that are written, and that compiled kernels are loaded from."""
    given = os.environ.get
    home = given("HF_HOME") or f"{given('XDG_CACHE_HOME') or '~/.cache'}/huggingface"
    yield _folder("HF cache", given("HF_HUB_CACHE") or f"{home}/hub", "HF_HOME")
    yield _folder("kernel cache", given("TRITON_CACHE_DIR") or "~/.triton", "TRITON_CACHE_DIR")
    # `tempfile` silently takes another folder than one that cannot be written.
    yield _folder("temporary files", given("TMPDIR") or tempfile.gettempdir(), "TMPDIR")


def _folder(name: str, folder: str, variable: str) -> Finding:
    path = Path(os.path.expanduser(folder))
    fix = f"set {variable} to a folder on a disk with space that is not mounted noexec"
    there = next(one for one in (path, *path.absolute().parents) if one.exists())
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
        free, flags = shutil.disk_usage(there).free, os.statvfs(there).f_flag
    except OSError as error:
        return Finding(PROBLEM, name, f"{path} cannot be written: {error}", fix)
    if free < MIN_FREE_BYTES:
        return Finding(PROBLEM, name, f"{path} has {free / 2**20:.0f} MiB free", fix)
    if name != "HF cache" and flags & os.ST_NOEXEC:
        return Finding(PROBLEM, name, f"{path} is mounted noexec: no kernel can be loaded from it", fix)
    return Finding(OK, name, f"{path}, {free / 2**30:.0f} GiB free")


def shared_memory(num_gpus: int) -> Finding:
    """Ranks on several GPUs exchange data by it."""
    free = shutil.disk_usage("/dev/shm").free
    text = f"/dev/shm has {free / 2**20:,.0f} MiB free"
    if num_gpus < 2 or free >= MIN_SHARED_BYTES:
        return Finding(OK, "shared memory", text)
    fix = "start the container with --shm-size=16g or --ipc=host"
    return Finding(PROBLEM, "shared memory", f"{text}, too little for {num_gpus} GPUs", fix)


def port(number: int) -> Finding:
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            server.bind(("127.0.0.1", number))
        except OSError as error:
            return Finding(NOTE, "port", f"{number}: {error}", "give idlm serve another port=")
    return Finding(OK, "port", f"{number} is free")
