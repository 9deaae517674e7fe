"""Memory of the card as the driver counts it: a ballast that leaves `cap` bytes, free bytes, and shortages.

torch's memory fraction does not see mapped pages, contexts or workspaces, so a cap must be taken from the
card itself: what the ballast holds is held for every allocator.

Also the longest canvas that a probe accepts, by bisection, and the timeline of one step: bytes alive after
each allocation and release."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.engine.canvas.sizes import GIB
from idlm.errors import UserError

SHORTAGES = ("out of memory", "ALLOC_FAILED", "OUT_OF_MEMORY", "not enough memory")
"""Messages of libraries for a failed allocation."""
TOO_LONG = "IDLM-0466"
"""The product's refusal of a canvas, or of a workspace, that does not fit."""


def ballast_bytes(cap_bytes: int, *, total_bytes: int, absent_bytes: int) -> int:
    """Bytes that leave `cap_bytes` of a card, of which `absent_bytes` count as weights that are left out."""
    return max(0, total_bytes - cap_bytes) + absent_bytes


def take_cap(cap_gib: float, *, absent_bytes: int) -> None:
    """Leave `cap_gib` GiB of the current device (0: all of it), less `absent_bytes`, until the process ends:
    the rest is taken with the driver's own call, and nothing uses it."""
    torch.empty(1, device="cuda")  # makes the context that the call below uses
    free, total = torch.cuda.mem_get_info()
    cap = int(cap_gib * GIB) if cap_gib else total
    if cap > total:
        raise UserError(
            "IDLM-0107", f"caps={cap_gib} on a card of {total / GIB:.2f} GiB", fix="use a smaller cap"
        )
    num_bytes = ballast_bytes(cap, total_bytes=total, absent_bytes=absent_bytes)
    driver, address = ctypes.CDLL("libcuda.so.1"), ctypes.c_uint64()
    if num_bytes and (status := driver.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(num_bytes))):
        raise UserError(
            "IDLM-0543",
            f"the ballast of {num_bytes / GIB:.2f} GiB cannot be taken (CUDA error {status}): "
            f"{free / GIB:.2f} of {total / GIB:.2f} GiB are free",
            fix="end other programs on this GPU, or use a larger cap",
        )


def shortage(error: BaseException) -> str | None:
    """The first line of an error about memory that ran out; None for any other error."""
    message = str(error).strip().partition("\n")[0]
    is_refusal = isinstance(error, UserError) and error.code == TOO_LONG
    is_short = isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and any(word in message for word in SHORTAGES)
    )
    return message if is_refusal or is_short else None


FIRST_STEP = 0.02
"""The first distance from the guess, as a share of it; it doubles until both bounds are known."""
TOLERANCE, MIN_TOLERANCE = 0.004, 32
"""The search ends when the bounds are this close, as a share of the length, and in tokens."""
SHORTEST, MAX_PROBES = 64, 40


@dataclass(slots=True)
class Search:
    """Probes in order; `too_long` is None while every probe succeeded, `fits` 0 while none did."""

    fits: int = 0
    too_long: int | None = None
    probes: list[tuple[int, bool]] = field(default_factory=list)

    def try_length(self, probe: Callable[[int], bool], length: int) -> None:
        is_fit = probe(length)
        self.probes.append((length, is_fit))
        if is_fit:
            self.fits = max(self.fits, length)
        else:
            self.too_long = length if self.too_long is None else min(self.too_long, length)


def longest(probe: Callable[[int], bool], *, guess: int, limit: int = 1 << 24) -> Search:
    """Bisect for the longest length that `probe` accepts, to `TOLERANCE` of it.

    A probe that accepts a length is taken to accept all shorter ones. Starting at the guess, steps double
    until one length fits and one does not. Nothing below `SHORTEST` or above `limit` is tried."""
    search, step = Search(), FIRST_STEP
    length = min(limit, max(SHORTEST, guess))
    while len(search.probes) < MAX_PROBES:
        search.try_length(probe, length)
        if search.too_long is None:
            if search.fits >= limit:
                break
            length = min(limit, max(length + 1, round(search.fits * (1 + step))))
        elif not search.fits:
            if search.too_long <= SHORTEST:
                break
            length = max(SHORTEST, min(search.too_long - 1, round(search.too_long * (1 - step))))
        else:
            gap = search.too_long - search.fits
            if gap <= max(MIN_TOLERANCE, round(TOLERANCE * search.fits)):
                break
            length = search.fits + gap // 2
        step = min(1.0, 2 * step)
    return search


MAX_POINTS = 400
SIGNS = {"alloc": 1, "free_completed": -1}
"""Events of torch's memory history that change the allocated bytes; a release counts when it is done."""
Timeline = list[tuple[float, float]]
"""Times in microseconds since the first event, and the bytes alive from then on."""


def timeline_of(events: Iterable[Mapping[str, Any]]) -> Timeline:
    changes = [
        (event["time_us"], SIGNS[event["action"]] * event["size"])
        for event in events
        if event["action"] in SIGNS
    ]
    points, alive = Timeline(), 0.0
    for time, change in changes:
        alive += change
        points.append((float(time - changes[0][0]), alive))
    return points


def peak_over_average(points: Sequence[tuple[float, float]]) -> float:
    """The most bytes alive over their average in time; the last point only ends the time."""
    area = sum(size * (end - start) for (start, size), (end, _) in zip(points, points[1:], strict=False))
    average = area / (points[-1][0] - points[0][0]) if area else 0.0
    return max(size for _, size in points) / average if average else 1.0


def fewer_points(points: Sequence[tuple[float, float]], maximum: int = MAX_POINTS) -> Timeline:
    """At most `maximum` points: of each run of points the one with the most bytes, so that peaks stay."""
    width = max(1, -(-len(points) // maximum))
    runs = [points[start : start + width] for start in range(0, len(points), width)]
    return [max(run, key=lambda point: point[1]) for run in runs]
