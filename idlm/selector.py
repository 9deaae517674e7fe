"""The files of a path selector of drafts, which training writes and the engine reads.

Of each mask row t, with hidden state h_t after the final norm and logits U_t, the 16 likeliest tokens are
candidates. S_t(a, b) = U_t(b) + <A[a] * (H h_t), B[b]> scores candidate b after the draft a before it; the
first draft follows the token that the pass emits (`kernels/draft_walk`). The other tokens keep their logits,
so that a new selector, with B = 0, changes nothing. Shapes: V vocabulary, D width, W the
selector's own width."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from idlm.errors import UserError, naming

SELECTOR_FILE = "selector.safetensors"
NUM_CANDIDATES = 16
SELECTOR_WIDTH = 256


class PathWeights(NamedTuple):
    """A, B and H. With B = 0 the selector changes no score."""

    previous_VW: Tensor
    candidate_VW: Tensor
    hidden_WD: Tensor


def check_selector(kind: str, directory: Path, *, vocab_size: int, width: int) -> None:
    """UserError IDLM-0621 for another kind than "path", and for a file that is missing or broken, or whose
    shapes do not fit the model's. No weights are read."""
    if kind != "path":
        raise UserError(
            "IDLM-0621",
            f"idlm_config.json names a selector of drafts of the unknown kind {kind!r} (known: 'path')",
            fix="decode without it: decoder.selector=false",
        )
    path = Path(directory) / SELECTOR_FILE
    what = f"{path}, which idlm_config.json names a selector of drafts, cannot be read"
    fix = "restore the file, or decode without it: decoder.selector=false"
    causes = (OSError, SafetensorError, struct.error)
    with naming("IDLM-0621", what, fix=fix, of=causes), safe_open(path, framework="pt") as file:
        stored = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    own = stored.get("hidden_WD", (SELECTOR_WIDTH,))[0]
    wanted = {
        "previous_VW": (vocab_size, own),
        "candidate_VW": (vocab_size, own),
        "hidden_WD": (own, width),
    }
    if stored != wanted:
        wrong = [
            f"{name} is {list(stored[name]) if name in stored else 'missing'}, not {list(shape)}"
            for name, shape in wanted.items()
            if stored.get(name) != shape
        ]
        wrong += [f"{name} is unknown" for name in stored.keys() - wanted.keys()]
        raise UserError(
            "IDLM-0621",
            f"the tensors of {path} do not fit the model: {'; '.join(wrong)}",
            fix="use the selector that was trained on this checkpoint, or decode without one: "
            "decoder.selector=false",
        )


def load_path_weights(directory: Path, *, dtype: torch.dtype, device: torch.device) -> PathWeights:
    """The weights of a file that `check_selector` allows."""
    with safe_open(Path(directory) / SELECTOR_FILE, framework="pt", device=str(device)) as file:
        return PathWeights(*(file.get_tensor(name).to(dtype) for name in PathWeights._fields))
