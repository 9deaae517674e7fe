"""Times of passes before traffic has shown any: measured in the warm-up, and kept in a cache file."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from idlm.log import get_logger

Point = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """`measured`: seconds of decoding passes by mode and number of sequences, without context. `widths`: rows
    of a sequence, by mode. `seconds_per_slot`: what attention takes to read the KV of a token.
    """

    measured: Mapping[tuple[int, int], float]
    widths: tuple[int, ...]
    seconds_per_slot: float = 0.0
    _by_mode: dict[int, list[Point]] = field(default_factory=dict, repr=False)

    def decoding(self, mode: int, num_sequences: int, num_slots: int = 0) -> float:
        """Seconds of a pass that only decodes, over `num_slots` tokens of context in all."""
        width, points = self.widths[mode], self._points_of(mode)
        if points and num_sequences <= points[-1][0]:
            seconds = _interpolated(points, num_sequences)
        elif points:
            last, seconds = points[-1]
            seconds += self._rows(num_sequences * width) - self._rows(last * width)
        else:
            seconds = self._rows(num_sequences * width)
        return seconds + num_slots * self.seconds_per_slot

    def prompt(self, mode: int, num_sequences: int, num_prompt_rows: int) -> float:
        """Seconds that prompt rows add to such a pass."""
        num_rows = num_sequences * self.widths[mode]
        return self._rows(num_rows + num_prompt_rows) - self._rows(num_rows)

    def _points_of(self, mode: int) -> list[Point]:
        if mode not in self._by_mode:
            own = sorted((n, seconds) for (number, n), seconds in self.measured.items() if number == mode)
            self._by_mode[mode] = [(float(n), seconds) for n, seconds in own]
        return self._by_mode[mode]

    @cached_property
    def _by_rows(self) -> list[Point]:
        least: dict[int, float] = {}
        for (mode, num_sequences), seconds in self.measured.items():
            num_rows = num_sequences * self.widths[mode]
            least[num_rows] = min(seconds, least.get(num_rows, seconds))
        return [(float(num_rows), seconds) for num_rows, seconds in sorted(least.items())]

    def _rows(self, num_rows: float) -> float:
        """Seconds of a pass by its rows alone; proportional to them beyond the measured ones."""
        last, seconds = self._by_rows[-1]
        return seconds * num_rows / last if num_rows > last else _interpolated(self._by_rows, num_rows)


def _interpolated(points: list[Point], at: float) -> float:
    """Linear between the points, constant outside."""
    number = bisect_left(points, (at,))
    if number in (0, len(points)):
        return points[min(number, len(points) - 1)][1]
    (before, low), (after, high) = points[number - 1], points[number]
    return low + (at - before) / (after - before) * (high - low)


def cache_file(said: Mapping[str, Any]) -> Path:
    """The file of times measured under `said`: GPU, model, modes and versions."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    digest = hashlib.sha256(json.dumps(said, sort_keys=True, default=str).encode()).hexdigest()
    return home / "idlm" / "step_times" / f"{digest[:32]}.json"


def read_times(path: Path) -> dict[tuple[int, int], float]:
    """Measured times; none if there is no such file, or it is not one of ours."""
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))["seconds"]
        times = {(int(mode), int(size)): float(seconds) for mode, size, seconds in rows}
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return times if all(0 < seconds < 1e3 for seconds in times.values()) else {}


def write_times(path: Path, times: Mapping[tuple[int, int], float]) -> None:
    """Replace the file at once; a folder that cannot be written costs a measurement next time."""
    text = json.dumps({"seconds": [[*key, seconds] for key, seconds in sorted(times.items())]})
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
            file.write(text)
        os.replace(file.name, path)
    except OSError as error:
        get_logger(__name__).info("step times are not kept: %s", error)
