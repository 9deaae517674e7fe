"""Clock and power of a GPU under a load that does not rest, as nvidia-smi reads them."""

from __future__ import annotations

import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

FIELDS = ("clocks.sm", "clocks.max.sm", "power.draw", "power.limit")
INTERVAL_MS = 50
CALLS_AT_ONCE = 8
STOP_SECONDS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Mean time of a call; medians of the second half of what was read, None where nothing was."""

    ms: float
    sm_mhz: float | None = None
    max_sm_mhz: float | None = None
    watts: float | None = None
    limit_watts: float | None = None


def sustained(call: Callable[[], Any], *, seconds: float = 2.0) -> Load:
    """Repeat a call on the current GPU for that long, and read clock and power beside it."""
    uuid = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
    command = ["nvidia-smi", f"--id=GPU-{uuid}", f"--query-gpu={','.join(FIELDS)}"]
    command += ["--format=csv,noheader,nounits", f"--loop-ms={INTERVAL_MS}"]
    try:
        reader = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    except OSError:
        return Load(ms=_repeated(call, seconds))
    try:
        ms = _repeated(call, seconds)
    finally:
        reader.terminate()
        try:
            said, _ = reader.communicate(timeout=STOP_SECONDS)
        except subprocess.TimeoutExpired:
            reader.kill()
            said, _ = reader.communicate()
    return read_load(ms, said)


def read_load(ms: float, said: str) -> Load:
    """What the lines of nvidia-smi say; lines that are no numbers are left out."""
    found = []
    for line in said.splitlines():
        words = line.split(",")
        if len(words) == len(FIELDS) and all(word.strip().replace(".", "", 1).isdecimal() for word in words):
            found.append([float(word) for word in words])
    if not found:
        return Load(ms=ms)
    medians = [statistics.median(column) for column in zip(*found[len(found) // 2 :], strict=True)]
    return Load(ms=ms, sm_mhz=medians[0], max_sm_mhz=medians[1], watts=medians[2], limit_watts=medians[3])


def _repeated(call: Callable[[], Any], seconds: float) -> float:
    """Milliseconds of a call."""
    torch.cuda.synchronize()
    start, num = time.perf_counter(), 0
    while num == 0 or time.perf_counter() - start < seconds:
        for _ in range(CALLS_AT_ONCE):
            call()
        num += CALLS_AT_ONCE
        torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - start) / num
