"""Ctrl-C before any line of the engine's records: nothing leaks, and every finished answer is kept."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from idlm.cli import command
from idlm.errors import UserError
from idlm.infer import engine as engine_module
from idlm.infer import scheduler as scheduler_module
from idlm.infer.cli import batch
from idlm.infer.cli.config import EngineArguments
from idlm.infer.cli.generate import generate
from idlm.infer.engine import Engine
from idlm.infer.interrupts import uninterrupted
from idlm.infer.request import Request
from idlm.infer.state import page_pool
from idlm.infer.state import page_pool as prefix_cache
from tests.contracts.engines import assert_idle
from tests.errors import ctrl_c_raises
from tests.integration.inference.command_lines import BASE, PROMPTS, TINY, read_lines, write_lines

MODULES = (engine_module, scheduler_module, page_pool, prefix_cache, batch)
FILES = {module.__file__ for module in MODULES}
MAX_TOKENS = 4
STRIDE = 31
"""Of about 390 lines every 31st is interrupted; all of them were, with 1."""
Line = tuple[str, int]


def _engine() -> Engine:
    """So few pages that a sequence is preempted."""
    options: dict[str, Any] = {"page_size": 2, "num_pages": 13, "max_num_batched_tokens": 40}
    return Engine.from_pretrained(
        TINY, "ar", device="cpu", dtype="float32", max_num_seqs=3, max_length=64, **options
    )


class Lines:
    """Calls `see` before every line of `MODULES`."""

    def __init__(self, see: Callable[[Line], object]) -> None:
        self._see = see

    def __enter__(self) -> None:
        sys.settrace(self._trace)

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _trace(self, frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_filename not in FILES:
            return None
        if event == "line":
            self._see((frame.f_code.co_filename, frame.f_lineno))
        return self._trace


@pytest.mark.sweep
def test_ctrl_c_at_any_line_keeps_what_is_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = _engine()
    monkeypatch.setattr(EngineArguments, "load", lambda *_, **__: engine)
    finished: list[str] = []
    complete = Request.complete

    def completing(request: Request, *arguments: Any, **options: Any) -> Any:
        if request.finish_reason != "abort":
            finished.append(request.request_id.partition(":")[2])
        return complete(request, *arguments, **options)

    monkeypatch.setattr(Request, "complete", completing)
    source = write_lines(tmp_path / "in.jsonl", [{"prompt": prompt} for prompt in PROMPTS[:4]])
    output, partial = tmp_path / "out", tmp_path / "out.partial"
    run = [*BASE, f"sampling.max_tokens={MAX_TOKENS}", f"input={source}", f"output={output}"]
    trail: list[Line] = []
    with Lines(trail.append):
        assert generate(run) == 0
    expected = {r["request_id"]: r["token_ids"] for r in read_lines(output)}
    assert engine.scheduler.num_preemptions
    for line, index in sorted(_middle_of(trail).items())[::STRIDE]:
        for path in (output, partial):
            path.unlink(missing_ok=True)
        finished.clear()
        capsys.readouterr()
        with ctrl_c_raises(), Lines(_ctrl_c_after(index)):
            assert command.run(generate, run) == 130, line
        assert capsys.readouterr().err.endswith("interrupted\n"), line
        assert_idle(engine)
        records = read_lines(partial) if partial.exists() else []
        assert sorted(r["request_id"] for r in records) == sorted(finished), line
        assert all(expected[r["request_id"]] == r["token_ids"] for r in records), line


def _ctrl_c_after(num_lines: int) -> Callable[[Line], None]:
    remaining = iter(range(num_lines))

    def see(_: Line) -> None:
        if next(remaining, None) is None:
            sys.settrace(None)
            signal.raise_signal(signal.SIGINT)

    return see


def _middle_of(trail: list[Line]) -> dict[Line, int]:
    """For each line, which of all lines it is in the middle one of its runs."""
    indices: dict[Line, list[int]] = {}
    for index, line in enumerate(trail):
        indices.setdefault(line, []).append(index)
    return {line: each[len(each) // 2] for line, each in indices.items()}


def _ctrl_c() -> None:
    signal.raise_signal(signal.SIGINT)


def test_a_signal_waits_for_the_end_of_the_outermost_block() -> None:
    reached = []
    with ctrl_c_raises(), pytest.raises(KeyboardInterrupt):
        with uninterrupted():
            with uninterrupted():
                _ctrl_c()
                reached.append("inner")
            reached.append("outer")
        reached.append("after")
    assert reached == ["inner", "outer"]
    with ctrl_c_raises(), pytest.raises(KeyboardInterrupt):
        _ctrl_c()


def test_a_second_signal_breaks_through() -> None:
    reached = []
    with ctrl_c_raises():
        with pytest.raises(KeyboardInterrupt), uninterrupted():
            _ctrl_c()
            reached.append("first")
            _ctrl_c()
            reached.append("second")
        with uninterrupted():
            reached.append("later")
    assert reached == ["first", "later"]


def test_it_replaces_an_error_that_it_caused() -> None:
    """A compiler that the terminal's Ctrl-C has ended too."""
    with ctrl_c_raises(), pytest.raises(KeyboardInterrupt) as stopped, uninterrupted():
        _ctrl_c()
        raise RuntimeError("the compiler has ended")
    assert isinstance(stopped.value.__cause__, RuntimeError)


def test_a_command_names_the_error_that_an_interrupt_replaced(capsys: pytest.CaptureFixture[str]) -> None:
    def fail(arguments: list[str]) -> int:
        with uninterrupted():
            _ctrl_c()
            raise UserError("IDLM-0428", "the disk is full", fix="free some space")

    with ctrl_c_raises():
        assert command.run(fail, []) == command.INTERRUPTED_STATUS
    assert "interrupted, after UserError: " in (output := capsys.readouterr().err)
    assert "the disk is full" in output


def test_sigterm_waits_and_an_ignored_signal_stays_ignored() -> None:
    received = []
    before = {
        signal.SIGTERM: signal.signal(signal.SIGTERM, lambda number, _: received.append(number)),
        signal.SIGINT: signal.signal(signal.SIGINT, signal.SIG_IGN),
    }
    try:
        with uninterrupted():
            _ctrl_c()
            _ctrl_c()
            signal.raise_signal(signal.SIGTERM)
            assert received == []
        assert received == [signal.SIGTERM]
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_an_event_loop_hears_a_signal_once() -> None:
    """Its handler does nothing; a file descriptor wakes the loop."""
    received = []

    async def work() -> None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, received.append, "once")
        with uninterrupted():
            _ctrl_c()
        for _ in range(20):
            await asyncio.sleep(0.001)

    asyncio.run(work())
    assert received == ["once"]


def test_another_thread_changes_no_handler() -> None:
    found = []

    def work() -> None:
        with uninterrupted():
            found.append(signal.getsignal(signal.SIGINT))

    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join(60)
    assert found == [before]


def test_a_child_that_is_forked_inside_hears_its_first_signal() -> None:
    before = signal.signal(signal.SIGTERM, lambda *_: os._exit(3))
    try:
        with uninterrupted():
            child = os.fork()
            if not child:
                signal.raise_signal(signal.SIGTERM)
                os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    finally:
        signal.signal(signal.SIGTERM, before)
