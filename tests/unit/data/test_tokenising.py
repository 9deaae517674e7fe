"""Tokenising for hours: the watchdog sees its progress, and finished parts are kept."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import pytest

from idlm.errors import UserError
from idlm.log import note_progress, progress_count
from idlm.train.check import data_problems
from idlm.train.config.data import DataConfig
from idlm.train.config.schema import LoopConfig, TrainConfig
from idlm.train.data import build, cache
from idlm.train.data.base import Encoder
from idlm.train.data.cache import CachedSource, pack
from idlm.train.data.layout import Sample
from idlm.train.distributed import collectives as waiting
from idlm.train.loop.watchdog import SLOW_FACTOR, Watchdog
from tests.errors import refused
from tests.unit.data import cached
from tests.unit.data.cached import read, write_lines

TOKENS_PER_SECOND = 296_000
NUM_RECORDS = 60


@pytest.fixture
def encoder(tokenizer: Any) -> Encoder:
    return Encoder(tokenizer, mask_token_id=None, use_chat_template=True)


def config_of(folder: Path, **changes: Any) -> DataConfig:
    records = [{"prompt": f"Sam has {i}.", "response": "1" * (10 + i % 7)} for i in range(NUM_RECORDS)]
    records[20]["response"] = ""
    path = folder / "a.jsonl"
    path = path if path.exists() else write_lines(path, *records)
    return cached.config_of(path, **{"on_bad_record": "skip"} | changes)


def counting(monkeypatch: pytest.MonkeyPatch, *, fails_at: int | None = None, error: Any = None) -> list[int]:
    """The lines that are encoded from now on; `error` is raised at line `fails_at`."""
    lines: list[int] = []

    def encode(encoder: Encoder, task: build.Encoded) -> build.Encoded:
        lines.append(task.number)
        if task.number == fails_at:
            raise error
        return original(encoder, task)

    original = build.encode
    monkeypatch.setattr(build, "encode", encode)
    return lines


@pytest.fixture
def stopped(tmp_path: Path, encoder: Encoder, monkeypatch: pytest.MonkeyPatch) -> DataConfig:
    """A build with parts of about 8 records that Ctrl-C ended at line 50."""
    monkeypatch.setattr(build, "PART_TOKENS", 200)
    config = config_of(tmp_path)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        counting(patch, fails_at=50, error=KeyboardInterrupt)
        read(config, encoder)
    return config


def part_folders(config: DataConfig) -> list[Path]:
    return sorted(Path(str(config.cache_dir)).glob("*/0*"))


def assert_same_cache(found: CachedSource, config: DataConfig, encoder: Encoder, folder: Path) -> None:
    whole = read(dataclasses.replace(config, cache_dir=str(folder)), encoder)
    for path in whole.directory.rglob("*.*"):
        name = path.relative_to(whole.directory)
        assert path.read_bytes() == (found.directory / name).read_bytes(), name


def last_line_of(part: Path) -> int:
    return json.loads((part / cache.HEADER).read_text())["num_records"]


def test_a_killed_build_continues_after_its_last_finished_part(
    stopped: DataConfig, encoder: Encoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = part_folders(stopped)
    assert len(kept) >= 3
    last_line = last_line_of(kept[-1])
    with monkeypatch.context() as patch:
        lines = counting(patch)
        source = read(stopped, encoder)
    assert lines == list(range(last_line + 1, NUM_RECORDS + 1))
    assert source.header["num_skipped"] == 1 and source.num_samples == NUM_RECORDS - 1
    assert [path.name for path in Path(str(stopped.cache_dir)).iterdir()] == [source.directory.name]
    assert_same_cache(source, stopped, encoder, tmp_path / "whole")


@pytest.mark.sweep_but("cut")
@pytest.mark.parametrize("damage", ["flip", "cut", "gone"])
def test_a_damaged_part_and_later_ones_are_tokenised_again(
    damage: str, stopped: DataConfig, encoder: Encoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, *_ = part_folders(stopped)
    last_line = last_line_of(first)
    tokens = second / cache.TOKENS
    content = bytearray(tokens.read_bytes())
    content[40] ^= 1
    if damage == "gone":
        tokens.unlink()
    else:
        tokens.write_bytes(content if damage == "flip" else content[:-4])
    with monkeypatch.context() as patch:
        lines = counting(patch)
        source = read(stopped, encoder)
    assert lines == list(range(last_line + 1, NUM_RECORDS + 1))
    assert_same_cache(source, stopped, encoder, tmp_path / "whole")


def test_parts_of_any_size_hold_the_same_samples(
    tmp_path: Path, encoder: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each record that has samples fills a part, so that the last part is empty."""
    whole = read(config_of(tmp_path), encoder)
    monkeypatch.setattr(build, "PART_TOKENS", 1)
    config = config_of(tmp_path, cache_dir=str(tmp_path / "small"))
    small = read(config, encoder)
    assert len(part_folders(config)) == NUM_RECORDS
    for index in range(NUM_RECORDS - 1):
        one, other = whole.sample(index), small.sample(index)
        assert one.origin == other.origin
        assert one.token_ids.tolist() == other.token_ids.tolist()
        assert one.supervised.tolist() == other.supervised.tolist()
    for name in ("lengths", "num_targets"):
        assert getattr(whole, name).tolist() == getattr(small, name).tolist()
    assert whole.prompt_keys.tolist() == small.prompt_keys.tolist()
    (new,) = set(whole.sample(2).token_ids) - set(whole.sample(1).token_ids) - set(whole.sample(0).token_ids)
    for source in (whole, small):
        refused(r"IDLM-0206.*a\.jsonl:3 ", source.refuse_token, int(new))


def test_parts_outlive_a_full_disk_and_not_refused_data(
    tmp_path: Path, encoder: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "PART_TOKENS", 200)
    config = config_of(tmp_path)
    original = Path.write_text

    def write_text(path: Path, *args: Any, **settings: Any) -> int:
        if path.name == cache.HEADER and len(part_folders(config)) == 3:
            raise OSError(28, "No space left on device")
        return original(path, *args, **settings)

    with monkeypatch.context() as patch, pytest.raises(UserError, match="IDLM-0301"):
        patch.setattr(Path, "write_text", write_text)
        read(config, encoder)
    assert len(part_folders(config)) == 3
    with pytest.raises(UserError, match="IDLM-0204"):
        read(config_of(tmp_path, on_bad_record="error", cache_dir=str(tmp_path / "other")), encoder)
    assert list(tmp_path.rglob("other/*")) == []


def test_refused_data_leaves_what_another_process_is_writing(
    tmp_path: Path, encoder: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It builds the same cache and is in the middle of a part."""
    monkeypatch.setattr(build, "PART_TOKENS", 200)
    config = config_of(tmp_path, on_bad_record="error")
    remove, staged = build._remove_parts, []

    def removing(directory: Path, num_parts: int) -> None:
        staged.append(directory / ".000002.staging-0" / "files")
        staged[0].mkdir(parents=True)
        remove(directory, num_parts)

    monkeypatch.setattr(build, "_remove_parts", removing)
    refused("IDLM-0204", read, config, encoder)
    assert staged[0].is_dir() and part_folders(config) == []


@pytest.mark.parametrize(("cores", "expected"), [(1, 1), (3, 3), (64, 8)])
def test_tokenising_takes_up_to_eight_cores_by_default(
    cores: int, expected: int, tmp_path: Path, encoder: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records of few bytes are encoded without starting processes, whatever their number."""
    started: list[int] = []

    def by_workers(tasks: Any, encoder: Encoder, num_workers: int) -> Iterator[build.Encoded]:
        started.append(num_workers)
        return (build.encode(encoder, task) for task in tasks)

    monkeypatch.setattr(build, "_encoded_by_workers", by_workers)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(cores))
    config = config_of(tmp_path)
    assert config.workers is None and not [*data_problems(TrainConfig(data=config))]
    whole = read(config, encoder)
    assert started == []
    monkeypatch.setattr(build, "BYTES_ALONE", 400)
    config.cache_dir = str(tmp_path / "again")
    assert read(config, encoder).digest() == whole.digest()
    assert started == ([expected] if expected > 1 else [])


class Clock:
    """A clock that only the test advances."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def watching(clock: Clock) -> Watchdog:
    hang_seconds = LoopConfig().hang_seconds
    return Watchdog(None, rank=0, world_size=1, hang_seconds=hang_seconds, clock=clock)


def judged(watchdog: Watchdog) -> Any:
    watchdog._exchange()
    return watchdog._judge()


def test_tokenising_for_hours_does_not_trigger_the_default_watchdog(
    tmp_path: Path, encoder: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Simulate 4.5 B tokens at 296 K tokens/s, in records of 75 M, with a fake clock."""
    clock, seen = Clock(), []
    watchdog = watching(clock)

    def encode(encoder: Encoder, task: build.Encoded) -> build.Encoded:
        for _ in range(2):
            clock.now += 75e6 / 2 / TOKENS_PER_SECOND
            seen.append(judged(watchdog))
        sample = pack(Sample.from_pair([1], [2, 3], origin=task.origin))
        return dataclasses.replace(task, samples=(sample,))

    monkeypatch.setattr(build, "encode", encode)
    read(config_of(tmp_path), encoder)
    assert clock.now == pytest.approx(4.5e9 / TOKENS_PER_SECOND) and clock.now > SLOW_FACTOR * 600
    assert len(seen) == 2 * NUM_RECORDS and not any(seen)
    clock.now += SLOW_FACTOR * watchdog.hang_seconds + 1
    assert judged(watchdog) is None, "the last record was finished after the last look"
    clock.now += SLOW_FACTOR * watchdog.hang_seconds + 1
    assert "hangs" in judged(watchdog)[0], "without progress it is still ended"


@pytest.mark.parametrize("is_hanging", [False, True])
def test_a_rank_that_waits_for_tokenising_makes_progress_as_long_as_that_does(
    is_hanging: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For 4.2 hours a waiting rank only receives the progress count of rank 0, every five seconds."""
    clock = Clock()
    watchdog = watching(clock)
    num_signs = round(4.2 * 3600 / 5)
    counts = iter([*(1 if is_hanging else 1 + sign for sign in range(num_signs)), 0])
    seen: list[Any] = []

    def highest(value: int) -> int:
        assert value == 0, "a rank that waits reports no work of its own"
        clock.now += waiting.SECONDS_BETWEEN_SIGNS
        seen.append(judged(watchdog))
        return next(counts)

    monkeypatch.setattr(waiting, "highest", highest)
    waiting.while_others_wait(None)
    assert any(seen) is is_hanging


def test_a_rank_that_tokenises_reports_its_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def highest(value: int) -> int:
        seen.append(value)
        while len(seen) < 2 and progress_count() < value:
            time.sleep(0.001)
        return value

    def work() -> None:
        while len(seen) < 2:
            note_progress()

    monkeypatch.setattr(waiting, "highest", highest)
    monkeypatch.setattr(waiting, "SECONDS_BETWEEN_SIGNS", 0.001)
    before = progress_count()
    waiting.while_others_wait(work)
    assert before < seen[0] < seen[1] and seen[-1] == 0


def test_a_killed_worker_is_an_error_that_says_so(encoder: Encoder, monkeypatch: pytest.MonkeyPatch) -> None:
    class Pool(ThreadPoolExecutor):
        def __init__(self, num_workers: int, **settings: Any) -> None:
            super().__init__(1)

        def submit(self, *work: Any) -> Any:
            done: Future[Any] = Future()
            done.set_exception(BrokenProcessPool("killed"))
            return done

    monkeypatch.setattr(build, "ProcessPoolExecutor", Pool)
    with pytest.raises(UserError, match="IDLM-0241.*was killed"):
        list(build._encoded_by_workers(iter([None]), encoder, 2))  # type: ignore[list-item]
