"""Real text as training rows for benchmarks on machines that have neither a checkpoint nor a network.

The text is the project's own sources and documents. Every short piece of text becomes an id
by its hash: ids are then spread and repeated as those of a real vocabulary are (Zipf), which determines the
cost of an embedding and its gradient. It is not a data source of the product."""

from __future__ import annotations

import functools
import re
import zlib
from pathlib import Path

import numpy as np

from idlm.train.data.layout import Sample

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("idlm", "train", "infer", "kernels", "benchmarks", "tests")
PIECE = re.compile(r" ?\w{1,6}|\s+|[^\w\s]")


class TextSource:
    """Endless samples: windows at pseudo-random positions of one text, every token supervised.

    Lengths are log-uniform from `shortest` to `length`; without `shortest` all have `length` tokens. Ids are
    hashes below `vocab_size`."""

    num_samples: int | None = None

    def __init__(
        self,
        *,
        length: int,
        vocab_size: int,
        shortest: int | None = None,
        seed: int = 0,
    ) -> None:
        self.length, self.shortest, self.seed = length, shortest or length, seed
        self.token_ids = np.asarray(hashed_ids(own_text(), vocab_size), dtype=np.int64)

    def sample(self, index: int) -> Sample:
        """Sample `index`; a pure function of it and the seed."""
        rng = np.random.default_rng([self.seed, index])
        length = round(np.exp(rng.uniform(np.log(self.shortest), np.log(self.length))))
        indices = (int(rng.integers(len(self.token_ids))) + np.arange(length)) % len(self.token_ids)
        return Sample(
            token_ids=self.token_ids[indices],
            supervised=np.ones(length, dtype=bool),
            origin=f"text window {index}",
        )


@functools.lru_cache(maxsize=1)
def own_text() -> str:
    """The project's Python sources and Markdown documents, in the order of their names."""
    paths = {
        *ROOT.glob("*.md"),
        *(path for folder in FOLDERS for kind in ("*.py", "*.md") for path in (ROOT / folder).rglob(kind)),
    }
    return "\n\n".join(path.read_text(encoding="utf-8") for path in sorted(paths))


def hashed_ids(text: str, vocab_size: int) -> list[int]:
    """An id below `vocab_size` for every piece of at most six letters with its leading space."""
    known: dict[str, int] = {}
    return [known.setdefault(piece, zlib.crc32(piece.encode()) % vocab_size) for piece in PIECE.findall(text)]
