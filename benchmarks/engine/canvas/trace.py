"""One memory timeline of a step: bytes alive after each allocation and release, and what follows from it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

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
