"""Traces of blocks: the places that each pass decided, and every mask's importance delta in it.

`benchmarks.decodability` records them, `synthetic.py` draws them, `benchmarks.eviction` replays them. A file
is JSON lines. The first says what was recorded: `block_size`, `threshold`, `alpha`, `source`. Every other
line is a block of a prompt: `arm` (full: no row is left out; focus), `prompt`, `start` (its first position),
`num_fixed` (places of the prompt's tail), and for each pass the places that it `decided` and the `deltas` of
the masks that it began with, from left to right.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from idlm.errors import UserError

TRACES = Path(__file__).resolve().parents[2] / "traces"
FULL, FOCUS = "full", "focus"
ARMS = (FULL, FOCUS)
DIGITS = 5
"""Significant digits of a delta in a file."""
HEADER = {"block_size": int, "threshold": float, "alpha": float, "source": str}
BLOCK = {"arm": str, "prompt": int, "start": int, "num_fixed": int, "decided": list, "deltas": list}


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockTrace:
    """One block. `decided[i]` are the places that pass i decided, ascending; `deltas[i]` one number for each
    of the masks that it began with.
    """

    prompt: int
    start: int
    num_fixed: int
    decided: tuple[tuple[int, ...], ...]
    deltas: tuple[tuple[float, ...], ...]

    def masks(self, size: int) -> list[list[int]]:
        """The masks that each pass begins with."""
        left, found = list(range(self.num_fixed, size)), []
        for places in self.decided:
            found.append(left)
            left = [place for place in left if place not in places]
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class UnmaskTrace:
    """The blocks of both arms; `source` says what they come from."""

    name: str
    block_size: int
    threshold: float
    alpha: float
    source: str
    blocks: dict[str, tuple[BlockTrace, ...]]

    def whole(self, arm: str) -> tuple[BlockTrace, ...]:
        """The blocks without places of a prompt."""
        return tuple(block for block in self.blocks[arm] if not block.num_fixed)

    def tokens_per_pass(self, arm: str) -> float:
        """Over whole blocks."""
        blocks = self.whole(arm)
        return self.block_size * len(blocks) / sum(len(block.decided) for block in blocks)


def rounded(deltas: Sequence[float]) -> tuple[float, ...]:
    """Deltas as a file holds them."""
    return tuple(float(f"{delta:.{DIGITS}g}") for delta in deltas)


def write_trace(trace: UnmaskTrace, path: Path) -> None:
    """Write a file that `read_trace` reads."""
    head = {"block_size": trace.block_size, "threshold": trace.threshold, "alpha": trace.alpha}
    lines: list[dict[str, Any]] = [head | {"source": trace.source}]
    for arm in ARMS:
        for block in trace.blocks[arm]:
            lines.append({"arm": arm} | asdict(block) | {"deltas": list(map(rounded, block.deltas))})
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{json.dumps(line, separators=(',', ':'))}\n" for line in lines), "utf-8")


def read_trace(path: Path, block_size: int) -> UnmaskTrace:
    """The trace in a file. UserError IDLM-0110, with file and line, for another block size, places that no
    mask of the block has, numbers that do not match, and blocks that do not end clean.
    """
    lines = path.read_text(encoding="utf-8").splitlines()
    head = _object(lines[0] if lines else "", HEADER, f"{path}, line 1")
    if head["block_size"] != block_size:
        raise _refused(
            f"{path}, line 1: block_size is {head['block_size']}, the benchmark's is {block_size}",
            fix=f"give block={head['block_size']}, or a trace of blocks of {block_size}",
        )
    blocks: dict[str, list[BlockTrace]] = {arm: [] for arm in ARMS}
    for number, line in enumerate(lines[1:], start=2):
        where = f"{path}, line {number}"
        found = _object(line, BLOCK, where)
        arm = found.pop("arm")
        if arm not in ARMS:
            raise _refused(f"{where}: arm is {arm!r}, allowed are {' and '.join(ARMS)}")
        blocks[arm].append(_block(found, block_size, where))
    trace = UnmaskTrace(name=path.stem, **head, blocks={arm: tuple(each) for arm, each in blocks.items()})
    empty = [arm for arm in ARMS if not trace.whole(arm)]
    if empty:
        raise _refused(f"{path}: no block without places of a prompt in arm {' and '.join(empty)}")
    return trace


def _block(found: dict[str, Any], size: int, where: str) -> BlockTrace:
    """A block, after finding whatever is wrong with it."""
    num_fixed, decided, deltas = found["num_fixed"], found["decided"], found["deltas"]
    if not 0 <= num_fixed < size:
        raise _refused(f"{where}: num_fixed is {num_fixed}, allowed are 0 to {size - 1}")
    left = set(range(num_fixed, size))
    for number, places in enumerate(decided):
        if not places or not isinstance(places, list):
            raise _refused(f"{where}: pass {number} decided {places!r}, a pass decides one place or more")
        wrong = [place for place in places if place not in left]
        if wrong or len(set(places)) < len(places):
            raise _refused(
                f"{where}: pass {number} decided places {wrong or places}, the block of {size} had masks at "
                f"{sorted(left)}"
            )
        given = deltas[number] if number < len(deltas) else []
        if not _are_numbers(given) or len(given) != len(left):
            raise _refused(f"{where}: pass {number} has {len(left)} masks, so it has as many deltas")
        left -= set(places)
    if left or len(deltas) != len(decided):
        raise _refused(
            f"{where}: {len(decided)} passes, {len(deltas)} lists of deltas, and places {sorted(left)} stay "
            "masked; a block ends clean"
        )
    return BlockTrace(
        prompt=found["prompt"],
        start=found["start"],
        num_fixed=num_fixed,
        decided=tuple(tuple(sorted(places)) for places in decided),
        deltas=tuple(tuple(map(float, each)) for each in deltas),
    )


def _object(line: str, fields: dict[str, type], where: str) -> dict[str, Any]:
    """The JSON object of a line, with exactly these fields."""
    try:
        found = json.loads(line)
    except json.JSONDecodeError as error:
        raise _refused(f"{where}: {error.msg}") from error
    if not isinstance(found, dict) or set(found) != set(fields):
        raise _refused(f"{where}: expected an object with {', '.join(fields)}")
    for key, kind in fields.items():
        allowed = (int, float) if kind is float else (kind,)
        if isinstance(found[key], bool) or not isinstance(found[key], allowed):
            raise _refused(f"{where}: {key}={found[key]!r} is not a {kind.__name__}")
    return found


def _are_numbers(values: Any) -> bool:
    return isinstance(values, list) and all(
        isinstance(value, int | float) and abs(value) < float("inf") for value in values
    )


def _refused(
    message: str, *, fix: str = "record it again: python -m benchmarks.decodability trace=FILE"
) -> UserError:
    return UserError("IDLM-0110", message, fix=fix)


def with_blocks(
    given: Iterable[tuple[Sequence[Sequence[int]], Sequence[Sequence[float]]]],
) -> tuple[BlockTrace, ...]:
    """Whole blocks from the places and deltas of their passes."""
    return tuple(
        BlockTrace(
            prompt=number,
            start=0,
            num_fixed=0,
            decided=tuple(tuple(sorted(places)) for places in decided),
            deltas=tuple(tuple(each) for each in deltas),
        )
        for number, (decided, deltas) in enumerate(given)
    )
