"""Real text as training rows for benchmarks on machines that have neither a checkpoint nor a network.

The text is the project's own sources and documents, or a file given by path. Without a tokenizer every short
piece of text becomes an id by its hash: ids are then spread and repeated as those of a real vocabulary are
(Zipf), which determines the cost of an embedding and its gradient. It is not a data source of the product.
"""

from __future__ import annotations

import functools
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from idlm.errors import UserError
from idlm.text.tokenizer import num_token_ids
from idlm.train.data.dataset import PackedDataset, collate
from idlm.train.data.layout import Sample
from idlm.train.objectives.curriculum import Curriculum, Stage
from idlm.train.objectives.idlm import IntrospectiveConsistency

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("idlm", "train", "infer", "kernels", "benchmarks", "tests")
PIECE = re.compile(r" ?\w{1,6}|\s+|[^\w\s]")
ENDLESS_STEPS = 1_000_000_000


class TextSource:
    """Endless samples: windows at pseudo-random places of one text, every token supervised.

    Lengths are log-uniform from `shortest` to `length`; without `shortest` all have `length` tokens. Ids are
    those of `tokenizer`, or hashes below `vocab_size`.
    """

    num_samples: int | None = None

    def __init__(
        self,
        *,
        length: int,
        vocab_size: int | None = None,
        tokenizer: Any = None,
        shortest: int | None = None,
        seed: int = 0,
        path: str | None = None,
    ) -> None:
        assert (vocab_size is None) != (tokenizer is None), "give a tokenizer or a vocabulary size"
        self.length, self.shortest, self.seed = length, shortest or length, seed
        text = own_text() if path is None else _text_of(Path(path))
        if tokenizer is not None:
            token_ids = tokenizer.encode(text, add_special_tokens=False)
        else:
            assert vocab_size is not None
            token_ids = hashed_ids(text, vocab_size)
        self.token_ids = np.asarray(token_ids, dtype=np.int64)

    def sample(self, index: int) -> Sample:
        """Sample `index`; a pure function of it and the seed."""
        rng = np.random.default_rng([self.seed, index])
        length = round(np.exp(rng.uniform(np.log(self.shortest), np.log(self.length))))
        places = (int(rng.integers(len(self.token_ids))) + np.arange(length)) % len(self.token_ids)
        return Sample(
            token_ids=self.token_ids[places],
            supervised=np.ones(length, dtype=bool),
            origin=f"text window {index}",
        )


def packed_batches(
    tokenizer_or_vocab_size: Any,
    *,
    max_length: int,
    row_length: int,
    batch_size: int,
    stride: int,
    seed: int,
    shortest: int | None = None,
    path: str | None = None,
) -> Iterator[dict[str, Tensor]]:
    """Endless collated batches of `[x_t | x_0]` rows, as the trainer gets them.

    The mask token is the first id after the vocabulary. Samples have `max_length` tokens, or at least
    `shortest`.
    """
    is_size = isinstance(tokenizer_or_vocab_size, int)
    num_ids = tokenizer_or_vocab_size if is_size else num_token_ids(tokenizer_or_vocab_size)
    source = TextSource(
        length=max_length,
        vocab_size=num_ids if is_size else None,
        tokenizer=None if is_size else tokenizer_or_vocab_size,
        shortest=shortest,
        seed=seed,
        path=path,
    )
    objective = IntrospectiveConsistency(mask_token_id=num_ids, mask_region="all")
    dataset = PackedDataset(
        source,
        objective,
        max_length=max_length,
        row_length=row_length,
        overlong="error",
        pad_token_id=0,
        seed=seed,
    )
    stage = Stage(index=0, stride=stride, num_steps=ENDLESS_STEPS, clean_weight=0.2)
    curriculum = Curriculum(stages=(stage,), global_batch=batch_size)
    dataset.start(curriculum)
    for first in range(0, curriculum.num_items, batch_size):
        yield collate([dataset[item] for item in range(first, first + batch_size)])


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


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            "IDLM-0209", f"cannot read text from {path}: {error}", fix="give a text file"
        ) from error
