"""Memory of the card as the driver counts it: a ballast that leaves `cap` bytes, free bytes, and shortages.

torch's memory fraction does not see mapped pages, contexts or workspaces, so a cap must be taken from the
card itself: what the ballast holds is held for every allocator.

Also the longest canvas that a probe accepts, by bisection, and the timeline of one step: bytes alive after
each allocation and release.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.engine.canvas.models import GIB
from idlm.errors import UserError

SHORTAGES = ("out of memory", "ALLOC_FAILED", "OUT_OF_MEMORY", "not enough memory")
"""What libraries say when an allocation of theirs fails."""
TOO_LONG = "IDLM-0466"
"""The product's refusal of a canvas, or of a workspace, that does not fit."""


class Ballast:
    """Device memory that nothing uses, taken with the driver's own call and held until the process ends."""

    def __init__(self, num_bytes: int) -> None:
        torch.empty(1, device="cuda")  # makes the context that the call below uses
        self.num_bytes = num_bytes
        if num_bytes <= 0:
            return
        driver = ctypes.CDLL("libcuda.so.1")
        address = ctypes.c_uint64()
        status = driver.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(num_bytes))
        free, total = torch.cuda.mem_get_info()
        if status != 0:
            raise UserError(
                "IDLM-0543",
                f"the ballast of {num_bytes / GIB:.2f} GiB cannot be taken (CUDA error {status}): "
                f"{free / GIB:.2f} of {total / GIB:.2f} GiB are free",
                fix="end other programs on this GPU, or use a larger cap",
            )


def ballast_bytes(cap_bytes: int, *, total_bytes: int, absent_bytes: int) -> int:
    """Bytes that leave `cap_bytes` of a card, of which `absent_bytes` count as weights that are left out."""
    return max(0, total_bytes - cap_bytes) + absent_bytes


def take_cap(cap_gib: float, *, absent_bytes: int) -> Ballast:
    """Leave `cap_gib` GiB of the current device (0: all of it), less `absent_bytes`."""
    total = torch.cuda.mem_get_info()[1]
    cap = int(cap_gib * GIB) if cap_gib else total
    if cap > total:
        raise UserError(
            "IDLM-0107", f"caps={cap_gib} on a card of {total / GIB:.2f} GiB", fix="use a smaller cap"
        )
    return Ballast(ballast_bytes(cap, total_bytes=total, absent_bytes=absent_bytes))


def shortage(error: BaseException) -> str | None:
    """The first line of an error that says that memory ran out; None for any other error."""
    message = str(error).strip().partition("\n")[0]
    is_refusal = isinstance(error, UserError) and error.code == TOO_LONG
    is_short = isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and any(word in message for word in SHORTAGES)
    )
    return message if is_refusal or is_short else None


def free_bytes(device: torch.device) -> int:
    """Free bytes of the card by the driver's count; 0 on a CPU."""
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    return int(torch.cuda.mem_get_info(device)[0])


def release(device: torch.device) -> None:
    """Give back what torch caches, so that the next measurement starts as the first did."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def device_counts(device: torch.device) -> dict[str, int]:
    """Bytes that torch has allocated and reserved, now and at most since `reset_counts`."""
    if device.type != "cuda":
        return dict.fromkeys(("allocated", "reserved", "max_allocated", "max_reserved"), 0)
    stats: dict[str, Any] = torch.cuda.memory_stats(device)
    return {
        "allocated": stats["allocated_bytes.all.current"],
        "reserved": stats["reserved_bytes.all.current"],
        "max_allocated": stats["allocated_bytes.all.peak"],
        "max_reserved": stats["reserved_bytes.all.peak"],
    }


def reset_counts(device: torch.device) -> None:
    """Start the peaks of `device_counts` again."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


FIRST_STEP = 0.02
"""The first distance from the guess, as a share of it; it doubles until both bounds are known."""
TOLERANCE = 0.004
"""The search ends when the bounds are this close, as a share of the length."""
MIN_TOLERANCE = 32


@dataclass(slots=True)
class Search:
    """Probes in order; `too_long` is None while every probe succeeded, `fits` 0 while none did."""

    fits: int = 0
    too_long: int | None = None
    probes: list[tuple[int, bool]] = field(default_factory=list)

    def try_length(self, probe: Callable[[int], bool], length: int) -> None:
        """Probe one length and narrow the bounds."""
        is_fit = probe(length)
        self.probes.append((length, is_fit))
        if is_fit:
            self.fits = max(self.fits, length)
        else:
            self.too_long = length if self.too_long is None else min(self.too_long, length)


def longest(
    probe: Callable[[int], bool],
    *,
    guess: int,
    shortest: int = 64,
    limit: int = 1 << 24,
    tolerance: float = TOLERANCE,
    max_probes: int = 40,
) -> Search:
    """Bisect for the longest length that `probe` accepts, to `tolerance` of it.

    A probe that accepts a length is taken to accept all shorter ones. Starting at the guess, steps double
    until one length fits and one does not. Nothing below `shortest` or above `limit` is tried.
    """
    search, step = Search(), FIRST_STEP
    length = min(limit, max(shortest, guess))
    while len(search.probes) < max_probes:
        search.try_length(probe, length)
        if search.too_long is None:
            if search.fits >= limit:
                break
            length = min(limit, max(length + 1, round(search.fits * (1 + step))))
        elif not search.fits:
            if search.too_long <= shortest:
                break
            length = max(shortest, min(search.too_long - 1, round(search.too_long * (1 - step))))
        else:
            gap = search.too_long - search.fits
            if gap <= max(MIN_TOLERANCE, round(tolerance * search.fits)):
                break
            length = search.fits + gap // 2
        step = min(1.0, 2 * step)
    return search


MAX_POINTS = 400
SIGNS = {"alloc": 1, "free_completed": -1}
"""Events of torch's memory history that change the allocated bytes; a release counts when it is done."""
Timeline = list[tuple[float, float]]
"""Times in microseconds since the first event, and the bytes alive from then on."""


def timeline_of(events: Iterable[Mapping[str, Any]], start_bytes: int = 0) -> Timeline:
    """The timeline of torch's trace of one device, from `start_bytes` on."""
    points: Timeline = []
    alive, first = float(start_bytes), None
    for event in events:
        sign = SIGNS.get(event["action"])
        if sign is None:
            continue
        time = float(event.get("time_us", len(points)))
        first = time if first is None else first
        alive += sign * event["size"]
        points.append((time - first, alive))
    return points


def peak_over_average(points: Sequence[tuple[float, float]], *, end: float | None = None) -> float:
    """The most bytes alive over their average in time; the last point counts until `end`."""
    if not points:
        return 1.0
    times = [time for time, _ in points] + [points[-1][0] if end is None else end]
    area = sum(size * (times[index + 1] - times[index]) for index, (_, size) in enumerate(points))
    span = times[-1] - times[0]
    average = area / span if span > 0 else sum(size for _, size in points) / len(points)
    return max(size for _, size in points) / average if average > 0 else 1.0


def fewer_points(points: Sequence[tuple[float, float]], most: int = MAX_POINTS) -> Timeline:
    """At most `most` points: of each run of points the one with the most bytes, so that peaks stay."""
    if len(points) <= most:
        return list(points)
    width = -(-len(points) // most)
    runs = [points[start : start + width] for start in range(0, len(points), width)]
    return [max(run, key=lambda point: point[1]) for run in runs]
