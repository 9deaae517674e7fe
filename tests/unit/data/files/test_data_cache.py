"""The cache of tokenised data: found again, built again when anything changed or broke, the same for any
number of processes; and the figures and plans that are made from it."""

from __future__ import annotations

import copy
import logging
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from idlm.errors import UserError
from idlm.train.config.schema import EvalConfig, LoopConfig, StageConfig, TrainConfig, make_curriculum
from idlm.train.data import build, cache
from idlm.train.data.base import Encoder
from idlm.train.data.checks import inspect_data
from idlm.train.data.dataset import PackedDataset
from idlm.train.data.layout import Sample
from idlm.train.data.packing import held_out_flags, split
from idlm.train.objectives.idlm import IntrospectiveConsistency
from idlm.train.prepare import remember_data
from tests.errors import refused
from tests.unit.data.cached import config_of, contents, read, write_lines

MASK = 190


def encoder_of(tokenizer, **changes: Any) -> Encoder:
    return Encoder(tokenizer, **({"mask_token_id": None, "use_chat_template": True} | changes))


def write(path: Path, num: int, *, seed: int = 0) -> Path:
    rng = np.random.default_rng(seed)
    texts = ["1" * int(length) for length in rng.integers(1, 60, size=num)]
    records = [{"prompt": f"Sam has {i}.", "response": text} for i, text in enumerate(texts)]
    return write_lines(path, *records)


def test_a_cache_is_found_again_until_something_changes(tmp_path: Path, tokenizer, monkeypatch) -> None:
    path = write(tmp_path / "a.jsonl", 20)
    built: list[str] = []
    original = build.build_cache

    def counting(reader, config, encoder, *, directory):
        built.append(directory.name)
        original(reader, config, encoder, directory=directory)

    monkeypatch.setattr(build, "build_cache", counting)
    first = read(config_of(path), encoder_of(tokenizer))
    read(config_of(path, workers=1, seed=5), encoder_of(tokenizer, mask_token_id=MASK))
    assert len(built) == 1
    read(config_of(path), encoder_of(tokenizer, thinking="strip"))
    read(config_of(path), encoder_of(tokenizer, turns="last"))
    read(config_of(path), encoder_of(tokenizer, use_chat_template=False))
    other = copy.deepcopy(tokenizer)
    other.chat_template = tokenizer.chat_template.replace("eos_token", "bos_token")
    read(config_of(path), encoder_of(other))
    assert len(set(built)) == len(built) == 5
    stamp = path.stat()
    path.write_text(path.read_text().replace("Sam has 7.", "Lea has 7."))
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    second = read(config_of(path), encoder_of(tokenizer))
    assert len(set(built)) == len(built) == 6
    changed = [
        index for index, pair in enumerate(zip(contents(first), contents(second))) if pair[0] != pair[1]
    ]
    assert changed == [7]


def test_a_damaged_cache_is_built_again_with_a_warning(
    tmp_path: Path, tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    config = config_of(write(tmp_path / "a.jsonl", 20))
    source = read(config, encoder_of(tokenizer))
    expected, files = contents(source), sorted(source.directory.glob("*/*"))
    assert len(files) == 4
    for file in files:
        for damage in ("cut", "flip", "gone"):
            # Tokens are hashed when they are read: the next test.
            if damage == "flip" and file.name == "tokens.bin":
                continue
            whole = bytearray(file.read_bytes())
            if damage == "gone":
                file.unlink()
            else:
                whole[len(whole) // 2] ^= 0x10
                file.write_bytes(whole[:-1] if damage == "cut" else whole)
            with caplog.at_level(logging.WARNING, logger="idlm"):
                caplog.clear()
                again = read(config, encoder_of(tokenizer))
            assert "is damaged" in caplog.text, f"{file.name} {damage}"
            assert contents(again) == expected, f"{file.name} {damage}"


def test_damaged_tokens_are_never_trained_on(tmp_path: Path, tokenizer, monkeypatch) -> None:
    monkeypatch.setattr(cache, "BLOCK_TOKENS", 64)
    config = config_of(write(tmp_path / "a.jsonl", 20))
    source = read(config, encoder_of(tokenizer))
    expected = contents(source)
    tokens = source.directory / "000000" / "tokens.bin"
    whole = tokens.read_bytes()
    for at in (0, len(whole) // 2, len(whole) - 1):
        tokens.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        damaged = read(config, encoder_of(tokenizer))
        right, refused = 0, []
        for index, sample in enumerate(expected):
            try:
                found = damaged.sample(index)
            except UserError as error:
                refused.append(error)
            else:
                assert (found.token_ids.tolist(), found.supervised.tolist()) == sample
                right += 1
        assert 0 < right < len(expected), "one block is refused, the others are used"
        assert all(error.code == "IDLM-0236" and str(source.directory) in error.fix for error in refused)


def test_a_build_that_fails_leaves_nothing_behind(tmp_path: Path, tokenizer) -> None:
    path = write(tmp_path / "a.jsonl", 20)
    whole = path.read_text()
    path.write_text(whole + "\n{")
    refused(r"IDLM-0201.*a\.jsonl:21", read, config_of(path), encoder_of(tokenizer))
    assert list(tmp_path.rglob("cache/*")) == []
    path.write_text(whole)
    assert read(config_of(path), encoder_of(tokenizer)).num_samples == 20


@pytest.mark.sweep
def test_several_processes_write_the_same_cache(tmp_path: Path, tokenizer) -> None:
    path = write(tmp_path / "a.jsonl", 200)
    lines = path.read_text().split("\n")
    lines[33] = lines[170] = '{"prompt": "Sam", "response": ""}'
    lines[80] = '{"prompt": [{"role": "user", "content": "Sam", "mood": "glad"}], "response": "1", "id": 4}'
    path.write_text("\n".join(lines))
    sources = []
    for workers in (0, 2):
        config = config_of(path, workers=workers, on_bad_record="skip")
        config.cache_dir = str(tmp_path / f"cache{workers}")
        sources.append(read(config, encoder_of(tokenizer)))
    for name in ("tokens.bin", "samples.bin", "data.json"):
        one, other = (source.directory / "000000" / name for source in sources)
        assert one.read_bytes() == other.read_bytes(), name
    assert sources[1].header["ignored"] == {"id": 1, "prompt[].mood": 1}
    assert sources[0].digest() == sources[1].digest()
    refused(r"IDLM-0204.*a\.jsonl:34", read, config_of(path, workers=2), encoder_of(tokenizer))


def dataset_of(
    source: Any, *, max_length: int = 40, row_length: int = 100, overlong: str = "drop", seed: int = 1
):
    objective = IntrospectiveConsistency(mask_token_id=MASK, mask_region="response")
    dataset = PackedDataset(
        source,
        objective,
        max_length=max_length,
        row_length=row_length,
        overlong=overlong,
        pad_token_id=0,
        seed=seed,
    )
    loop = LoopConfig(stages=[StageConfig(stride=2, fraction=1.0)], epochs=3, batch_size=4)
    dataset.curriculum = make_curriculum(
        TrainConfig(train=loop), world_size=1, rows_per_epoch=dataset.rows_per_epoch()
    )
    return dataset


def test_rows_are_a_pure_function_and_every_epoch_uses_every_sample_once(tmp_path: Path, tokenizer) -> None:
    source = read(config_of(write(tmp_path / "a.jsonl", 300)), encoder_of(tokenizer))
    datasets = [dataset_of(source) for _ in range(2)]
    rows = len(datasets[0].rows)
    items = np.random.default_rng(0).permutation(3 * rows)
    backward = {int(item): datasets[0].rows.members(int(item)) for item in items}
    assert backward == {item: datasets[1].rows.members(item) for item in range(3 * rows)}
    fitting = {index for index in range(300) if len(source.sample(index)) <= 40}
    epochs = [[i for item in range(e * rows, (e + 1) * rows) for i in backward[item]] for e in range(3)]
    for epoch in epochs:
        assert sorted(epoch) == sorted(fitting)
    assert epochs[0] != epochs[1] != epochs[2]
    assert datasets[0].rows.num_dropped == 300 - len(fitting) > 0
    costs = [
        sum(datasets[0].rows.limits.num_rows(s) for s in datasets[0].rows.row(item)) for item in range(rows)
    ]
    assert max(costs) <= 100
    assert datasets[0].rows.padding_share == pytest.approx(1 - sum(costs) / (100 * rows))
    assert backward != {item: dataset_of(source, seed=2).rows.members(item) for item in range(3 * rows)}


@given(
    flags=st.lists(st.booleans(), min_size=2, max_size=60),
    max_length=st.integers(2, 20),
    row_length=st.integers(4, 40),
    region=st.sampled_from(["response", "all"]),
)
def test_pieces_predict_every_token_but_the_first_once(
    flags: list[bool], max_length: int, row_length: int, region: str
) -> None:
    sample = Sample(token_ids=np.arange(len(flags)), supervised=np.asarray(flags))
    objective = IntrospectiveConsistency(mask_token_id=MASK, mask_region=region)

    def rows_of(piece: Sample) -> int:
        return objective.num_rows(len(piece), piece.num_targets)

    pieces = split(sample, lambda piece: rows_of(piece) <= row_length, max_length=max_length)
    predicted = [at for start, stop in pieces for at in range(start + 1, stop)]
    assert predicted == list(range(1, len(flags)))
    for start, stop in pieces:
        assert stop - start <= max_length
        assert rows_of(sample.piece(start, stop)) <= row_length
    for start, stop in pieces[:-1]:
        is_longest = stop - start == max_length
        assert is_longest or rows_of(sample.piece(start, stop + 1)) > row_length


def test_all_pieces_of_a_split_corpus_are_trained(tmp_path: Path, tokenizer) -> None:
    path = write_lines(tmp_path / "a.jsonl", *({"text": "1" * num} for num in (300, 20, 95)))
    dataset = dataset_of(read(config_of(path), encoder_of(tokenizer)), overlong="split", row_length=80)
    rows = len(dataset.rows)
    targets = [int((dataset[item]["labels"] >= 0).sum()) for item in range(rows)]
    # bos and eos come with each text; every token but bos is predicted on both halves.
    assert sum(targets) == 2 * sum(num + 1 for num in (300, 20, 95))
    assert dataset.rows.num_dropped == 0
    report = inspect_data(config_of(path), dataset, tokenizer)
    assert report.num_overlong == {"dropped": 0, "split": 2}


def test_the_report_counts_what_is_there(tmp_path: Path, tokenizer) -> None:
    path = write(tmp_path / "a.jsonl", 200)
    first, second, *others = path.read_text().split("\n")
    lines = [first[:-1] + ', "id": 4}', second[:-1] + ', "id": 5, "source": "x"}', *others]
    path.write_text("\n".join(lines) + '\n{"prompt": 3}')
    config = config_of(path, on_bad_record="skip")
    source = read(config, encoder_of(tokenizer))
    dataset = dataset_of(source, overlong="truncate")
    report = inspect_data(config, dataset, tokenizer)
    samples = [source.sample(index) for index in range(200)]
    lengths = np.asarray([len(sample) for sample in samples])
    assert report.num_samples == 200 and np.array_equal(report.lengths, lengths)
    assert report.num_supervised == sum(int(sample.supervised.sum()) for sample in samples)
    assert f"sample {lengths.argmax()} " in report.longest_origin
    assert report.num_overlong == {"dropped": 0, "truncated": (lengths > 40).sum()}
    assert report.num_open == 0
    text = "\n".join(report.lines())
    assert "ignored keys: id (2 records), source (1)\n" in text
    assert "1 files, 201 records (200 of pair)" in text and "1 bad records skipped" in text
    assert f"{lengths.sum():,} tokens" in text and f"50/90/99 %: {int(np.median(lengths))}/" in text
    assert f"longest {lengths.max()} (" in text
    assert "a.jsonl:201" in text and "thinking=keep" in text and "warning: " in text
    assert "supervised tokens are lost" in text


def test_a_run_does_not_continue_with_other_data(tmp_path: Path, tokenizer) -> None:
    path, run = write(tmp_path / "a.jsonl", 10), tmp_path / "run"
    run.mkdir()
    first = read(config_of(path), encoder_of(tokenizer))
    remember_data(run, first, is_continued=False)
    os.utime(path, (1, 1))
    again = read(config_of(path), encoder_of(tokenizer))
    assert again.directory != first.directory
    remember_data(run, again, is_continued=True)
    write(path, 11)
    other = read(config_of(path), encoder_of(tokenizer))
    refused("IDLM-0235.*10 samples that are not the 11", remember_data, run, other, is_continued=True)
    remember_data(run, other, is_continued=False)
    remember_data(run, other, is_continued=True)


def test_a_model_that_would_never_stop_is_refused(tmp_path: Path, tokenizer) -> None:
    path = write(tmp_path / "a.jsonl", 10)
    endless = copy.deepcopy(tokenizer)
    endless.chat_template = tokenizer.chat_template.replace("{{ eos_token }}", "")
    config = config_of(path)
    dataset = dataset_of(read(config, encoder_of(endless)))
    refused(r"IDLM-0234.*would never stop.*a\.jsonl:", inspect_data, config, dataset, endless)
    one = endless.encode("1", add_special_tokens=False)[0]
    assert inspect_data(config, dataset, endless, stop_token_ids=[one]).num_open == 0


def test_turns_of_one_conversation_are_held_out_together(tmp_path: Path, tokenizer) -> None:
    def messages(number: int) -> list[dict[str, str]]:
        return [{"role": "user", "content": str(number)}, {"role": "assistant", "content": "2"}] * 3

    path = write_lines(tmp_path / "a.jsonl", *({"messages": messages(number)} for number in range(40)))
    source = read(config_of(path), encoder_of(tokenizer, turns="each", use_chat_template=True))
    assert source.num_samples == 120
    flags = held_out_flags(EvalConfig(every=1, holdout=0.2), source, seed=0)
    assert flags is not None
    by_record = flags.reshape(40, 3)
    assert (by_record.any(axis=1) == by_record.all(axis=1)).all()
    assert 0 < by_record.any(axis=1).sum() < 40


def test_few_rows_that_make_many_epochs_are_warned_about() -> None:
    stages = [StageConfig(stride=stride, fraction=1 / 3) for stride in (2, 3, 4)]
    config = TrainConfig(train=LoopConfig(stages=stages, epochs=2, batch_size=32))
    with pytest.warns(UserWarning, match="the 3 steps are 96 epochs"):
        make_curriculum(config, world_size=1, rows_per_epoch=1)


def test_a_file_that_is_cut_while_it_is_mapped_is_refused(tmp_path: Path, tokenizer) -> None:
    """Reading beyond its end would end the process with SIGBUS. What is removed stays mapped."""
    source = read(config_of(write(tmp_path / "a.jsonl", 20)), encoder_of(tokenizer))
    source.sample(0)
    tokens = source.directory / "000000" / "tokens.bin"
    os.truncate(tokens, 0)
    refused("IDLM-0236.*tokens.bin, is shorter than when it was opened", source.sample, 0)
