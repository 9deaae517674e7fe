"""Chooses the draft layout of the next step: the mode with the most tokens per second at this load.

It uses measured acceptance and step times, never the values of drafts that are still to be tested; a sequence
may therefore change its mode at any step without changing its sampling distribution. With `StepTimes` of a
warm-up, which is cached on disk, the first choice is already informed, and what passes show corrects it: a
factor for all modes at a load (clock, contexts), and one for each mode. Without, times are estimated from
those of similar numbers of rows and every mode that looks best is tried."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from idlm.errors import UserError
from idlm.files.disk import replace_text
from idlm.infer.decoders.base import StrideMode
from idlm.infer.runtime.draft_acceptance import PRIOR_ACCEPTANCE, DraftAcceptance
from idlm.infer.runtime.graphs.pass_costs import Captured, Point, interpolated
from idlm.infer.state.batch import Schedule
from idlm.log import get_logger


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """`measured`: seconds of decoding passes by mode and number of sequences, without context. `widths`: rows
    of a sequence, by mode. `seconds_per_slot`: what attention takes to read the KV of a token."""

    measured: Mapping[tuple[int, int], float]
    widths: tuple[int, ...]
    seconds_per_slot: float = 0.0

    def decoding(self, mode: int, num_sequences: int, num_slots: int = 0) -> float:
        """Seconds of a pass that only decodes, over `num_slots` tokens of context in all."""
        width, points = self.widths[mode], self._by_mode.get(mode)
        if points and num_sequences <= points[-1][0]:
            seconds = interpolated(points, num_sequences)
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

    @cached_property
    def _by_mode(self) -> dict[int, list[Point]]:
        found: dict[int, list[Point]] = {}
        for (mode, num_sequences), seconds in sorted(self.measured.items()):
            found.setdefault(mode, []).append((float(num_sequences), seconds))
        return found

    @cached_property
    def _by_rows(self) -> list[Point]:
        minimum: dict[int, float] = {}
        for (mode, num_sequences), seconds in self.measured.items():
            num_rows = num_sequences * self.widths[mode]
            minimum[num_rows] = min(seconds, minimum.get(num_rows, seconds))
        return [(float(num_rows), seconds) for num_rows, seconds in sorted(minimum.items())]

    def _rows(self, num_rows: float) -> float:
        """Seconds of a pass by its rows alone; proportional to them beyond the measured ones."""
        last, seconds = self._by_rows[-1]
        return seconds * num_rows / last if num_rows > last else interpolated(self._by_rows, num_rows)


def cache_file(key: Mapping[str, Any]) -> Path:
    """The file of times measured under `key`: GPU, model, modes and versions."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    digest = hashlib.sha256(json.dumps(key, sort_keys=True, default=str).encode()).hexdigest()
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
        replace_text(path, text)
    except (OSError, UserError) as error:
        get_logger(__name__).info("step times are not stored: %s", error)


NUM_STORED_TIMES = 8
MAX_TIME_AGE = 24
"""Times of a mode are dropped after this many timed steps without it: under load a GPU slows down by 15 %
within a second (an H200 at 64 sequences)."""
TRIAL_PASSES, MIN_STEPS_BETWEEN_TRIALS = 3, 32
MAX_AWAITED_STEPS = 16
"""Results of a trial are read at most so many steps later, else it is repeated."""
EXPLORATION_BUDGET = 0.002
"""Fraction of the passes that retrying one slower mode may cost: what loses more is retried less."""
TESTING_BUDGET = 0.005
"""The same for testing drafts while the best mode has none: only tests show that acceptance changes."""
MAX_EXPLORATION, MAX_DEBT = 0.006, 4.0
"""What all of these trials may cost together, if so many passes run at once."""
FIRST_BUDGET, FIRST_DOUBT = 0.06, 0.03
"""The same for all modes together that a warm-up has measured and traffic has not, if they look as fast as
the best; by e times less for every such share by which they look slower."""
NARROW_MARGIN = 0.01
"""The narrowest mode, whose tokens are certain, is left for one that looks better by more than this."""
MAX_FIRST_RATIO = 2.0
"""A first time beyond so many times the warm-up's does not count."""
MIN_PROMPT_SHARE = 0.5
"""A mixed pass corrects the cost of prompts if they take at least this share of decoding, else that of it."""
LIKELY_ACCEPTANCE = (*((each, each) for each in (0.6, 0.7, 0.8, 0.85, 0.9, 0.95)), (0.9, 0.5))
"""Of the sequences that accept most and of the others."""
FREE_ROWS = 256
"""About as many rows as a GPU computes while it reads the weights: 156 (A100) to 295 (H100) in bfloat16."""
MIN_HALVED_SEQUENCES = 4
"""Fewer sequences are not worth modes with different halves."""
OOM_MEMORY_STEPS = 1000
"""Steps for which an out-of-memory error limits the rows of a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLoad:
    """What a step has to do whatever its mode: `num_sequences`, of which `num_decoding` decode (None: all),
    `num_prompt_rows` of the others, and `num_slots` of context in all. `drafts`: accepted and tested drafts
    of decoding sequences of late (empty: they are average ones). `is_plain`, `takes_drafts`: as in
    `Members`."""

    num_sequences: int
    num_decoding: int | None = None
    num_prompt_rows: int = 0
    num_slots: int = 0
    drafts: Sequence[tuple[float, float]] = ()
    is_plain: bool = True
    takes_drafts: bool = True

    @classmethod
    def of(cls, schedule: Schedule, *, has_drafts: bool = True) -> StepLoad:
        """The load of a schedule, from what is known before its pass."""
        drafting = zip(schedule.requests, schedule.samples, strict=True) if has_drafts else ()
        return cls(
            num_sequences=len(schedule.requests),
            num_decoding=sum(schedule.samples),
            num_prompt_rows=sum(schedule.num_feed) - len(schedule.requests),
            num_slots=sum(schedule.num_known),
            drafts=[(one.recent_accepted, one.recent_tested) for one, samples in drafting if samples],
            is_plain=schedule.members.is_plain,
            takes_drafts=schedule.members.takes_drafts,
        )

    @property
    def has_halves(self) -> bool:
        """Whether its sequences may differ in their rows: prompts and grammars need those of one layout."""
        return self.is_plain and not self.num_prompt_rows and self.num_sequences >= MIN_HALVED_SEQUENCES

    @property
    def size(self) -> int:
        """The number of sequences rounded up to a power of two: times are stored by it."""
        return 1 << (self.num_sequences - 1).bit_length()


@dataclass(slots=True)
class _Timing:
    """Times of one mode at one size, over those of the warm-up if there are any. The first is dropped if it
    may include compiling or capturing; the shortest of the others counts, because disturbances only make a
    step longer. `correction`: what the mode takes on top of the warm-up's time more than the first mode at
    this size does."""

    num_seen: int = 0
    last_chosen: int = 0
    last_timed: int = 0
    correction: float = 1.0
    ratios: deque[float] = field(default_factory=lambda: deque(maxlen=NUM_STORED_TIMES))

    def minimum(self) -> float:
        return min(self.ratios)


class StrideController:
    """Compares modes by expected tokens, from measured acceptance, per measured or estimated second.

    `acceptance`: expected, by position, before any draft was tested. `times` of a warm-up, and `captured`:
    which passes have graphs (None: all), without which only the narrowest mode does. No trial takes more than
    `max_slowdown` times as long as the best mode."""

    def __init__(
        self,
        modes: tuple[StrideMode, ...],
        widths: tuple[int, ...],
        tokens_per_forward: Callable[[Sequence[float], StrideMode], float],
        *,
        acceptance: Sequence[float] = (),
        times: StepTimes | None = None,
        max_slowdown: float = math.inf,
    ) -> None:
        self._modes, self._widths = modes, widths
        self._tokens_per_forward = lru_cache(maxsize=4096)(tokens_per_forward)
        num_drafts = max(mode.stride for mode in modes) - 1
        self._acceptance = DraftAcceptance([*acceptance, *[PRIOR_ACCEPTANCE] * num_drafts][:num_drafts])
        self.times = times
        self.captured: Captured | None = None
        self._max_slowdown = max_slowdown
        self._timings: dict[tuple[int, int], _Timing] = {}
        self._leaders: dict[int, int] = {}
        self._drifts: dict[int, float] = {}
        self._prompt_factor = 1.0
        self._num_steps = self._num_timed = self._last_oom = self._last_rows = self._last_trial = 0
        self._last_tested, self._debt, self._trial = 0, 0.0, (0, 0)
        self._narrowest = min(range(len(widths)), key=widths.__getitem__)
        self._max_rows: float = math.inf

    def choose(self, load: StepLoad) -> int:
        """The mode, by number, for a step of such a load: the fastest, or one that is due for a trial.

        After an out-of-memory error the narrowest, and for `OOM_MEMORY_STEPS` only modes with fewer rows."""
        self._num_steps += 1
        number = self._choice(load)
        timing = self._timings.get((load.size, number))
        if timing is not None:
            timing.last_chosen = self._num_steps
        if self._modes[number].stride > 1:
            self._last_tested = self._num_steps
        self._debt = max(0.0, self._debt - MAX_EXPLORATION)
        self._last_rows = load.num_sequences * self._widths[number]
        return number

    def _choice(self, load: StepLoad) -> int:
        since = self._num_steps - self._last_oom
        if (self._last_oom and since == 1) or load.num_decoding == 0 or not load.takes_drafts:
            return self._narrowest
        if since > OOM_MEMORY_STEPS:
            self._max_rows = math.inf
        fitting = [n for n in range(len(self._modes)) if self._may_run(n, load)]
        if not fitting:
            return self._narrowest
        tokens = self._tokens(load.drafts)
        seconds = {number: self.seconds(number, load) for number in fitting}
        worth = {number: tokens[number] for number in fitting}
        if self._narrowest in worth:
            worth[self._narrowest] *= 1 + NARROW_MARGIN
        price = max(worth[number] / seconds[number] for number in fitting)
        if load.num_prompt_rows:
            # Prompts are stored whatever the mode: a mode gains its tokens, and costs the time that it adds.
            for number in fitting:
                seconds[number] += self._prompt_seconds(number, load)
        best = max(fitting, key=lambda number: worth[number] - price * seconds[number])
        if load.num_prompt_rows and self.times is None:
            return best
        pass_seconds = worth[best] / price
        ratios = {
            number: (tokens[number] / tokens[best], 1 + (seconds[number] - seconds[best]) / pass_seconds)
            for number in fitting
        }
        ratios = {number: ratio for number, ratio in ratios.items() if ratio[1] <= self._max_slowdown}
        return self._best_or_trial(load.size, best, ratios)

    def _may_run(self, number: int, load: StepLoad) -> bool:
        """Whether a pass in this mode has the memory for its rows, and a graph if it needs one."""
        if self._modes[number].narrow is not None and not load.has_halves:
            return False
        num_rows = load.num_sequences * self._widths[number]
        if num_rows > self._max_rows or self.captured is None or number == self._narrowest:
            return num_rows <= self._max_rows
        num_all = num_rows + load.num_prompt_rows
        return self.captured.launches_fast(number, load.num_sequences, num_all, load.num_prompt_rows)

    def observe_out_of_memory(self) -> None:
        self._last_oom = self._num_steps
        self._max_rows = min(self._max_rows, self._last_rows - 1)

    def observe_time(self, mode: int, load: StepLoad, seconds: float) -> None:
        """Record the time of a step. Without times of a warm-up, steps that store prompts do not count."""
        if load.num_prompt_rows or load.num_decoding == 0:
            if self.times is None or load.num_decoding == 0:
                return
            added = self.times.prompt(mode, load.num_sequences, load.num_prompt_rows)
            decoding = self.seconds(mode, load)
            if added >= MIN_PROMPT_SHARE * decoding:
                found = min(3.0, max(0.3, (seconds - decoding) / added))
                self._prompt_factor += (found - self._prompt_factor) / NUM_STORED_TIMES
                return
            seconds = max(decoding / 2, seconds - self._prompt_factor * added)
        timing = self._timings.setdefault((load.size, mode), _Timing())
        self._num_timed += 1
        if self._num_timed - timing.last_timed > MAX_TIME_AGE:
            timing.ratios.clear()
        timing.num_seen += 1
        timing.last_timed = self._num_timed
        ratio = seconds / self._unit(mode, load)
        if timing.num_seen > 1 or (self.times is not None and ratio < MAX_FIRST_RATIO):
            timing.ratios.append(ratio)
            self._correct(mode, load.size, timing)

    def _correct(self, mode: int, size: int, timing: _Timing) -> None:
        """Attribute what differs from the warm-up: to the load if its first mode shows it, else to the
        mode."""
        leads = self._leaders.setdefault(size, mode) == mode
        if leads or timing.num_seen > 2 * NUM_STORED_TIMES:
            self._drifts[size] = timing.minimum() / timing.correction
        else:
            timing.correction = timing.minimum() / self._drift(size)

    def observe_drafts(self, num_accepted: int, num_tested: int, *, from_masks: bool = True) -> None:
        self._acceptance.observe(num_accepted, num_tested, from_masks=from_masks)

    def acceptance(self, position: int) -> float:
        """Acceptance probability of the draft at `position`, given that those before it were accepted."""
        return self._acceptance.average()[position]

    def likely_modes(self, num_sequences: int) -> set[int]:
        """The modes that are fastest at so many sequences, by the times known so far, for some acceptance."""
        load, numbers = StepLoad(num_sequences=num_sequences), range(len(self._modes))
        seconds = [self.seconds(number, load) for number in numbers]

        def rate(number: int, chances: tuple[float, float]) -> float:
            mode = self._modes[number]
            halves = zip((mode, mode.narrow or mode), chances, strict=True)
            tokens = [self._tokens_per_forward((each,) * (half.stride - 1), half) for half, each in halves]
            return sum(tokens) / seconds[number]

        fastest = (max(numbers, key=lambda number: rate(number, each)) for each in LIKELY_ACCEPTANCE)
        return {self._narrowest, *fastest}

    def _tokens(self, drafts: Sequence[tuple[float, float]]) -> list[float]:
        """Expected tokens of a pass by mode, the mean over sequences; those that accept most are wide."""
        classes, sums = self._acceptance.classes(drafts), [0.0] * len(self._modes)
        total = sum(classes.values())
        num_wide = total / 2
        for chances, count in sorted(classes.items(), reverse=True):
            wide = min(count, num_wide)
            num_wide -= wide
            for number, mode in enumerate(self._modes):
                narrow = mode.narrow or mode
                sums[number] += wide * self._tokens_per_forward(chances[: mode.stride - 1], mode)
                if count > wide:
                    tokens = self._tokens_per_forward(chances[: narrow.stride - 1], narrow)
                    sums[number] += (count - wide) * tokens
        return [value / total for value in sums]

    def seconds(self, number: int, load: StepLoad) -> float:
        """Time of a step without its prompt rows: measured, or estimated."""
        timing = self._timings.get((load.size, number))
        is_old = timing is None or self._num_timed - timing.last_timed > MAX_TIME_AGE
        if timing is not None and timing.ratios and not (is_old and self.times is not None):
            return timing.minimum() * self._unit(number, load)
        if self.times is None:
            return self._estimated(load.size, load.size * self._widths[number])
        correction = 1.0 if timing is None else timing.correction
        return self._unit(number, load) * self._drift(load.size) * correction

    def _unit(self, mode: int, load: StepLoad) -> float:
        """The unit in which times of the mode are stored."""
        if self.times is None:
            return 1.0
        return self.times.decoding(mode, load.num_sequences, load.num_slots)

    def _drift(self, size: int) -> float:
        """Factor of all modes at this size, else at the nearest one."""
        if size in self._drifts or not self._drifts:
            return self._drifts.get(size, 1.0)
        return self._drifts[min(self._drifts, key=lambda other: abs(other.bit_length() - size.bit_length()))]

    def _prompt_seconds(self, mode: int, load: StepLoad) -> float:
        """What the prompt rows add to a step."""
        if self.times is not None:
            added = self.times.prompt(mode, load.num_sequences, load.num_prompt_rows)
            return self._prompt_factor * added
        size, num_rows = load.size, load.size * self._widths[mode]
        return self._estimated(size, num_rows + load.num_prompt_rows) - self._estimated(size, num_rows)

    def _estimated(self, size: int, num_rows: int) -> float:
        """From timed steps, of this size if there are any: proportional to the next one with more rows, and
        at least that of one with fewer; `FREE_ROWS` beyond all of them cost nothing. Like a roofline this is
        optimistic; a mode that looks best is then tried and timed."""
        timed = [key for key in self._timings if self._is_timed(*key)]
        own = [key for key in timed if key[0] == size]
        known = sorted((key[0] * self._widths[key[1]], self._timings[key].minimum()) for key in own or timed)
        if not known:
            return float(max(FREE_ROWS, num_rows))
        fewer = [point for point in known if point[0] <= num_rows]
        more = [point for point in known if point[0] > num_rows]
        rows, seconds = more[0] if more else (fewer[-1][0] + FREE_ROWS, fewer[-1][1])
        return max(seconds * num_rows / rows, fewer[-1][1] if fewer else 0.0)

    def _best_or_trial(self, size: int, best: int, ratios: Mapping[int, tuple[float, float]]) -> int:
        """The best mode, or one whose trial continues or is due. `ratios`: tokens and time of a pass over
        those of the best mode. A trial takes several passes, so that no single disturbed step decides it."""
        since_trial, (trial_size, tried) = self._num_steps - self._last_trial, self._trial
        if since_trial < TRIAL_PASSES and trial_size == size and tried in ratios:
            return tried
        if self.times is None and not self._is_timed(size, best):
            is_awaited = self._trial == (size, best) and since_trial <= MAX_AWAITED_STEPS
            if is_awaited and size * self._widths[best] > FREE_ROWS:
                timed = [number for number in ratios if self._is_timed(size, number)]
                return max(timed, key=lambda n: ratios[n][0] / ratios[n][1], default=self._narrowest)
            return self._start_trial(size, best)
        costs = {number: _trial_cost(*ratio) for number, ratio in ratios.items() if number != best}
        for number, cost in costs.items():
            timing = self._timings.get((size, number))
            if timing is not None:
                is_due = self._may_explore(self._num_steps - timing.last_chosen, EXPLORATION_BUDGET, cost)
            else:
                emits, takes = ratios[number]
                factor = math.exp((emits / takes - 1) / FIRST_DOUBT)
                is_due = self.times is not None and since_trial * FIRST_BUDGET * factor > cost
            if is_due:
                return self._start_trial(size, number, cost)
        if costs and self._modes[best].stride == 1:
            number = min(costs, key=costs.__getitem__)
            if self._may_explore(self._num_steps - self._last_tested, TESTING_BUDGET, costs[number]):
                return self._start_trial(size, number, costs[number])
        return best

    def _may_explore(self, since: int, budget: float, cost: float) -> bool:
        """Whether a trial of such a cost is due so many passes after the last one of its kind."""
        return since > MIN_STEPS_BETWEEN_TRIALS and since * budget > cost and self._debt + cost <= MAX_DEBT

    def _start_trial(self, size: int, number: int, cost: float = 0.0) -> int:
        self._last_trial, self._trial = self._num_steps, (size, number)
        self._debt += max(0.0, cost)
        return number

    def _is_timed(self, size: int, number: int) -> bool:
        return (size, number) in self._timings and len(self._timings[size, number].ratios) > 0


def _trial_cost(emits: float, takes: float) -> float:
    """Passes of the best mode that are lost to a trial of one that emits and takes so many times as much. The
    first pass of the wider one of both lacks drafts: it emits what the narrower one does."""
    return TRIAL_PASSES * takes + 1 - (TRIAL_PASSES - 1) * emits - 2 * min(1.0, emits)
