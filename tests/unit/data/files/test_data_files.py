"""Which files a path means, how they are read, and what a stop signal leaves of processes that read them."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from accelerate.data_loader import DataLoaderShard
from torch.utils.data import Dataset

from idlm.errors import UserError
from idlm.files.paths import likely_encoding
from idlm.files.records import SUFFIXES, search
from idlm.train.checkpoint.save import SavingTrainer
from idlm.train.data.base import Encoder
from idlm.train.data.checks import files_text
from idlm.train.data.sources.jsonl import JsonlReader
from idlm.train.loop.trainer import IdlmTrainer
from tests.errors import refused
from tests.unit.data.cached import read

RECORD = {"prompt": "a", "response": "b"}
LINE = json.dumps(RECORD) + "\n"
NOT_DATA = (
    *(".ipynb_checkpoints/a-checkpoint.jsonl", ".Trash-0/files/old.jsonl", "._a.jsonl", ".~lock.a.jsonl#"),
    *("__MACOSX/a.jsonl", "deep/.git/x.jsonl", "~$a.jsonl", ".hidden.jsonl", "x.tmp/a.jsonl", "info.json"),
    *("a.jsonl~", "a.jsonl.tmp", "a.jsonl.part", "a.jsonl.crdownload", "deep/b.jsonl.gz", "README.md"),
)
PACKERS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": lambda data: bytes(pyarrow.compress(data, codec="zstd", asbytes=True)),
}


def written(path: Path, content: str | bytes = LINE) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def rows(path: Path | str) -> list[Any]:
    return [row.value for row in JsonlReader(str(path), SUFFIXES["jsonl"]).rows()]


def test_hidden_and_temporary_files_of_a_folder_are_left_out_and_named(tmp_path: Path) -> None:
    folder = tmp_path / ".private data [1]"
    data = [written(folder / name) for name in ("a.jsonl", "c.ndjson", "deep/b.jsonl", "z.JSONL.zst")]
    for name in NOT_DATA:
        written(folder / name)
    found = search(str(folder), SUFFIXES["jsonl"])
    assert list(found.paths) == sorted(data)
    # Of a hidden folder the folder is named.
    hidden = {str(folder / name) for name in NOT_DATA}
    assert all(any(name.startswith(out) for out in found.left_out) for name in hidden)
    every = search(str(folder / "**" / "*.jsonl*"), SUFFIXES["jsonl"])
    assert list(every.paths) == [folder / "a.jsonl", folder / "deep" / "b.jsonl"]
    assert str(folder / ".ipynb_checkpoints/a-checkpoint.jsonl") in every.left_out
    for name in NOT_DATA:
        assert search(str(folder / name), SUFFIXES["jsonl"]).paths == (folder / name,), "named explicitly"
    assert len(search(str(folder / "._*"), SUFFIXES["jsonl"]).paths) == 1
    inside = search(str(folder / ".ipynb_checkpoints" / "*.jsonl"), SUFFIXES["jsonl"]).paths
    assert len(inside) == 1
    described = [written(tmp_path / "card" / name) for name in ("a.json", "dataset_infos.json")]
    assert search(str(tmp_path / "card"), SUFFIXES["jsonl"]) == ((described[0],), (str(described[1]),))
    with pytest.raises(UserError, match=r"IDLM-0209.*left out: .*\.tmp"):
        search(str(written(tmp_path / "empty" / "a.jsonl.tmp").parent), SUFFIXES["jsonl"])


def test_the_plan_folds_the_names_of_many_files(tmp_path: Path) -> None:
    header = {"files": [f"/d/x/{i}.jsonl" for i in range(12)], "left_out": ["/d/x/.git/"]}
    assert files_text(header) == [
        f"reads 12 files in /d/x: {', '.join(f'{i}.jsonl' for i in range(8))} and 4 more",
        "leaves out /d/x/.git/ (hidden, temporary or of another kind)",
    ]
    assert files_text({"files": ["a/b.jsonl", "a/c/d.jsonl"]}) == ["reads 2 files in a: b.jsonl, c/d.jsonl"]


def test_moved_data_is_named_where_it_lies_now(tmp_path: Path, tokenizer: Any) -> None:
    encoder = Encoder(tokenizer, mask_token_id=None, use_chat_template=True)
    path = written(tmp_path / "old" / "a.jsonl", '{"text": "Sam has 1."}')
    first = read(path, encoder, cache_dir=str(tmp_path / "cache"))
    (tmp_path / "old").rename(tmp_path / "new")
    path = tmp_path / "new" / "a.jsonl"
    second = read(path, encoder, cache_dir=str(tmp_path / "cache"))
    assert second.directory == first.directory, "it is not tokenised again"
    assert second.origin(0) == f"{path}:1"


def test_linked_folders_are_read_once_and_lost_links_are_named(tmp_path: Path) -> None:
    elsewhere = written(tmp_path / "disk" / "a.jsonl").parent
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "part").symlink_to(elsewhere)
    (elsewhere / "back").symlink_to(folder)
    assert len(rows(folder)) == 1
    (folder / "gone.jsonl").symlink_to(tmp_path / "nowhere")
    refused(r"IDLM-0237.*gone\.jsonl", JsonlReader(str(folder), SUFFIXES["jsonl"]).identity)


@pytest.mark.parametrize("ending", PACKERS)
def test_a_compressed_file_is_read_and_one_that_is_cut_short_is_named(tmp_path: Path, ending: str) -> None:
    records = [RECORD | {"id": os.urandom(300).hex()} for _ in range(300)]
    content = "".join(json.dumps(record) + "\n" for record in records).encode()
    packed = PACKERS[ending](content)
    path = written(tmp_path / f"a.jsonl{ending}", packed)
    assert rows(path) == records
    assert rows(written(tmp_path / "misnamed.jsonl", packed)) == records
    # As `cat` and parallel compressors write.
    half = content.index(b"\n", len(content) // 2) + 1
    assert rows(written(path, PACKERS[ending](content[:half]) + PACKERS[ending](content[half:]))) == records
    for size in (len(packed) - 1, len(packed) // 2, 5, 0):
        written(path, packed[:size])
        refused(rf"IDLM-0231.*a\.jsonl{ending} \(after line \d+\) breaks off", rows, path)
    text = written(path, PACKERS[ending](LINE.encode("utf-16")))
    refused(r"IDLM-0239.*is not UTF-8 but UTF-16", rows, text)


WIDE = ("utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be")
TEXTS = {
    "ISO-8859-1": ("Le café est très bon", "¿Qué tal, señor?"),
    "WINDOWS-1252": ("“It’s fine” – he said", "5 € pour l’été"),
    "WINDOWS-1250": ("Zażółć gęślą jaźń", "Příliš žluťoučký kůň"),
    "WINDOWS-1251": ("Привет, как дела?",),
    "KOI8-R": ("Привет, как дела?",),
    "EUC-KR": ("안녕하세요. 오늘은 좋은 날입니다",),
    "SHIFT_JIS": ("こんにちは、今日は良い日です",),
    "EUC-JP": ("東京タワーへ行く",),
    "GB18030": ("你好，今天是个好日子", "使用Python编程很有意思。"),
    "BIG5": ("你好，今天是個好日子",),
}


@pytest.mark.parametrize("name", ["a.jsonl", "a b'.json"])
@pytest.mark.parametrize("encoding", [*WIDE, "iso-8859-1"])
def test_another_encoding_is_named_and_the_fix_converts_the_file(
    tmp_path: Path, encoding: str, name: str
) -> None:
    record = RECORD | {"prompt": "Où est le café ?"}
    content = json.dumps([record] if name.endswith(".json") else record, ensure_ascii=False)
    path = written(tmp_path / name, content.encode(encoding))
    with pytest.raises(UserError, match="IDLM-0239") as caught:
        [value] = rows(path)
        raise value
    kind = encoding.upper().replace("-LE", "LE").replace("-BE", "BE")
    assert f"iconv -f {kind} " in caught.value.fix and kind in caught.value.message
    subprocess.run(["sh", "-c", caught.value.fix.partition(": ")[2]], check=True)
    assert rows(path) == [record]


def test_encodings_are_told_by_the_letters_that_their_languages_use() -> None:
    for encoding, texts in TEXTS.items():
        for text in texts:
            line = f'{{"prompt": "Hello", "response": "{text}"}}'.encode(encoding)
            assert likely_encoding(line) == encoding, text
    damaged = '{"prompt": "naïve ü 😀"}'.encode()[:-3]
    assert likely_encoding(damaged) is None


def test_a_damaged_line_is_named_and_can_be_skipped(tmp_path: Path) -> None:
    good = json.dumps(RECORD | {"prompt": "é ü ñ"}, ensure_ascii=False).encode()
    bad = good.replace(b"\xc3\xbc", b"\xc3")
    first, second = rows(written(tmp_path / "a.jsonl", b"\xef\xbb\xbf" + good + b"\n" + bad))
    assert first["prompt"] == "é ü ñ" and isinstance(second, UserError)
    assert "a.jsonl:2" in second.message and "repair or delete that line" in second.fix


ROOT = Path(__file__).resolve().parents[4]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT)}


class WorkerIds(Dataset[int]):
    """Every item is the process that made it."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return os.getpid()


def test_data_workers_outlive_the_signals_that_stop_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    seeded = DataLoaderShard(
        WorkerIds(), num_workers=1, prefetch_factor=1, worker_init_fn=lambda worker: None
    )
    monkeypatch.setattr(SavingTrainer, "get_train_dataloader", lambda self: seeded, raising=False)
    items = iter(IdlmTrainer.get_train_dataloader(object.__new__(IdlmTrainer)))
    worker = int(next(items))
    assert worker != os.getpid()
    for number in (signal.SIGTERM, signal.SIGINT):
        os.kill(worker, number)
    assert [int(item) for item in items] == [worker] * 7


FAILS_WITH_ITS_LOADER_OPEN = """
from accelerate.data_loader import DataLoaderShard
from tests.unit.data.files.test_data_files import WorkerIds
from idlm.train.checkpoint.save import SavingTrainer
from idlm.train.loop.trainer import IdlmTrainer

loader = DataLoaderShard(WorkerIds(), num_workers=1, worker_init_fn=lambda worker: None)
SavingTrainer.get_train_dataloader = lambda self: loader
items = iter(IdlmTrainer.get_train_dataloader(object.__new__(IdlmTrainer)))
next(items)
raise RuntimeError("planted")
"""


@pytest.mark.sweep
def test_a_run_that_fails_with_its_loader_open_ends() -> None:
    # Its workers ignore the signal by which multiprocessing would end them.
    command = [sys.executable, "-c", FAILS_WITH_ITS_LOADER_OPEN]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False, env=ENVIRONMENT
    )
    assert done.returncode == 1 and "planted" in done.stderr
