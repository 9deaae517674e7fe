"""Several ranks share one cache: rank 0 builds while the others wait, and all ranks train on the same data.

python -m pytest -m sweep tests/integration/training/test_data_ranks.py"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = """
import sys
from torch import distributed as dist
from idlm.errors import UserError
from idlm.text.tokenizer import load_tokenizer
from idlm.train.config.data import DataConfig
from idlm.train.data import build
from idlm.train.data import dataset as opening
from idlm.train.data.base import make_encoder
from idlm.train.distributed import collectives as waiting

rank, paths = int(sys.argv[1]), sys.argv[2:]
dist.init_process_group("gloo", rank=rank, world_size=2)
waiting.SECONDS_BETWEEN_SIGNS = 0.2
original = build.build_cache
def telling(*args, **settings):
    print("built", flush=True)
    original(*args, **settings)
build.build_cache = telling
for number, path in enumerate(paths):
    one_each = f"/rank{rank}" if number == 1 else ""
    data = DataConfig(path=path.replace("RANK", str(rank)), cache_dir=f"{path}.cache{one_each}")
    encoder = make_encoder(data, load_tokenizer("recipes/assets/tiny_ar"), None)
    try:
        source = opening.open_source_on_all_ranks(data, encoder, output_dir="unused")
        print(source.digest(), flush=True)
    except UserError as error:
        print(error.code, flush=True)
dist.destroy_process_group()
"""


def write(path: Path, *texts: str) -> None:
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts))


@pytest.fixture
def lines_of_ranks(tmp_path: Path) -> list[list[str]]:
    """What two ranks print about: one file and cache, a cache each, different files, a bad file."""
    for name in ("shared", "each"):
        write(tmp_path / name, *(f"Sam has {number}." for number in range(50)))
    write(tmp_path / "mine0", "Sam has 1.", "Sam has 2.")
    write(tmp_path / "mine1", "Sam has 1.", "Sam has 3.")
    write(tmp_path / "bad", "Sam has 1.", " ")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    paths = [str(tmp_path / name) for name in ("shared", "each", "mineRANK", "bad")]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(rank), *paths],
            cwd=ROOT,
            env=os.environ
            | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "LOCAL_RANK": "0"}
            | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [rank.communicate(timeout=120)[0].split() for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    return outputs


@pytest.mark.sweep
def test_ranks_share_or_build_and_agree(lines_of_ranks: list[list[str]]) -> None:
    first, second = lines_of_ranks
    shared, each = first[1], first[3]
    assert first == ["built", shared, "built", each, "built", "IDLM-0233", "built", "IDLM-0204"]
    # The last file stops rank 0 before the other rank's turn.
    assert second == [shared, "built", each, "built", "IDLM-0233", "IDLM-0204"]
    assert shared == each
