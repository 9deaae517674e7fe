"""One canvas with more than 2^31 elements in a tensor: every index of its path must be 64 bits wide.

Attention to a whole canvas has no order but that of the positions given, so a canvas whose rows are stored
backwards has the same logits: what a narrow index would read wrongly behind 2^31 elements lies in front."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from idlm.infer.engine import Engine
from idlm.infer.state.batch import PLAIN_ROWS
from tests.gpu.engine import test_mosaic_gpu as mosaic
from tests.gpu.engine.test_mosaic_gpu import WIDE, wide

__all__ = ["wide"]
pytestmark = pytest.mark.alone
NUM_ROWS, NUM_WANTED = 620_000, 64
SHARPNESS = 8**0.5
"""Of queries and of keys. Scores then spread by 8, so few rows out of all decide what a row attends to."""
SAME, OTHER = 0.03, 0.1
"""Relative differences of logits: rounding of bf16 sums in another order, and rows that were read wrongly."""
TRUE_WIDTHS: dict[str, dict[str, Any]] = {
    "llada": {"d_model": 4096, "n_heads": 32, "n_kv_heads": 32, "mlp_hidden_size": 12288, "n_layers": 1},
    "dream": {
        "hidden_size": 3584,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "intermediate_size": 18944,
        "num_hidden_layers": 1,
    },
    "llada_moe": {
        "hidden_size": 2048,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "head_dim": 128,
        "num_hidden_layers": 1,
    },
}


@pytest.fixture(scope="module", autouse=True)
def _true_widths() -> Any:
    """The checkpoint of fixture `wide` in true width, with one layer."""
    with pytest.MonkeyPatch.context() as patch:
        for kind, widths in TRUE_WIDTHS.items():
            patch.setitem(WIDE, kind, {**WIDE[kind], **widths})
        yield


def _logits(
    engine: Engine, token_ids_R: torch.Tensor, positions_R: torch.Tensor, rows_X: torch.Tensor
) -> torch.Tensor:
    plan: Any = SimpleNamespace(
        token_ids_R=token_ids_R,
        positions_R=positions_R,
        logit_rows_X=rows_X,
        cu_rows_B1=torch.tensor([0, len(token_ids_R)]),
        canvases=PLAIN_ROWS,
    )
    runner: Any = engine._parts.runner
    return runner.forward(plan).logits().float().cpu()


def _difference(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).square().mean().sqrt() / one.square().mean().sqrt())


def test_rows_behind_2_to_the_31_elements_are_read_as_those_in_front(wide: Path) -> None:
    engine = mosaic.engine_of(wide, "mosaic", max_length=4096)
    spec, layer = engine._parts.model.spec, engine._parts.model.trunk.layers[0]
    if layer.qk_norm is None:
        layer.qkv[: (spec.num_heads + spec.num_kv_heads) * spec.head_dim] *= SHARPNESS
    else:
        layer.qk_norm.mul_(SHARPNESS)
    generator = torch.Generator(device="cuda").manual_seed(0)
    token_ids_R = torch.randint(4000, (NUM_ROWS,), generator=generator, device="cuda")
    positions_R = torch.arange(NUM_ROWS, device="cuda")
    ends_X = torch.cat((positions_R[: NUM_WANTED // 2], positions_R[-NUM_WANTED // 2 :]))

    forwards = _logits(engine, token_ids_R, positions_R, ends_X)
    backwards = _logits(engine, token_ids_R.flip(0), positions_R.flip(0), NUM_ROWS - 1 - ends_X)
    assert forwards.isfinite().all() and _difference(forwards, backwards) < SAME
    # The canvas can tell: other tokens behind the bound change what rows in front of it predict.
    bound = min(2**31 // spec.width, NUM_ROWS - 20_000)
    changed_R = token_ids_R.clone()
    changed_R[bound : NUM_ROWS - NUM_WANTED] = token_ids_R[: NUM_ROWS - NUM_WANTED - bound]
    assert _difference(forwards, _logits(engine, changed_R, positions_R, ends_X)) > OTHER
