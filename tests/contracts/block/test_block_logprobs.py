"""Log-probabilities of block diffusion are those of the passes in which tokens were decided."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from idlm.contracts import SamplingParams
from idlm.errors import UserError
from tests.block_reference import Rules, Sampling, SlowBlocks
from tests.contracts.block.test_block_decoder import (
    LENGTHS,
    PROMPTS,
    SETTINGS,
    SIZE,
    STRATEGIES,
    write_block_toy,
)
from tests.contracts.engines import MASK_ID, build_engine

pytestmark = pytest.mark.decides

WAYS: list[dict[str, Any]] = [
    {"graphs": "on", "num_inflight_steps": 4, "max_num_seqs": 3},
    {},
    {"num_pages": 16, "max_num_seqs": 5},
]
PARTS = {"threshold": 0.5, "sub_block_size": 2, "dual_cache": True}
EDITS = {"threshold": 0.4, "edit_threshold": 0.2}


@pytest.fixture(scope="module")
def toys(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    return {
        shifted: write_block_toy(tmp_path_factory.mktemp("toy"), shifted=shifted) for shifted in (False, True)
    }


@pytest.mark.sweep_but(2)
@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize(
    ("shifted", "options"),
    [
        (False, STRATEGIES[2]),
        (True, STRATEGIES[2]),
        (False, EDITS),
        (True, PARTS),
        (False, PARTS),
        *((False, one) for one in STRATEGIES[:2]),
    ],
)
def test_logprobs_are_those_of_the_passes_that_decided(
    toys: dict[bool, Path], shifted: bool, options: dict[str, Any], way: dict[str, Any]
) -> None:
    """Beside requests without any, and for other numbers of alternatives."""
    names = {"edit_threshold": "edit", "sub_block_size": "part", "dual_cache": "reuses"}
    fields: dict[str, Any] = {names.get(name, name): value for name, value in options.items()}
    slow = SlowBlocks(toys[shifted], Rules(size=SIZE, mask=MASK_ID, shifted=shifted, **fields))
    params = [
        SamplingParams(seed=seed, ignore_eos=True, logprobs=(3, None, 20, 0)[seed % 4], **setting)  # type: ignore[arg-type]
        for seed, setting in enumerate(SETTINGS)
    ]
    found = build_engine(toys[shifted], "block", **options, **way).generate(PROMPTS, params)
    for seed, (done, prompt, sent) in enumerate(zip(found, PROMPTS, params, strict=True)):
        if sent.logprobs is None:
            assert done.logprobs is None
            continue
        assert done.logprobs is not None
        slow.answer(prompt, Sampling(seed=seed, **SETTINGS[seed]))  # type: ignore[arg-type]
        expected = [slow.logprobs[len(prompt) + index] for index in range(len(done.token_ids))]
        assert [token.token_id for token in done.logprobs] == [*done.token_ids]
        assert [token.logprob for token in done.logprobs] == pytest.approx(expected, abs=1e-4)
        for token in done.logprobs:
            assert len(token.top) == sent.logprobs and MASK_ID not in token.top
            assert [*token.top.values()] == sorted(token.top.values(), reverse=True)
            assert token.top.get(token.token_id, token.logprob) == pytest.approx(token.logprob)
    assert len(found) == len(LENGTHS)


def test_more_alternatives_than_are_kept_are_refused(toys: dict[bool, Path]) -> None:
    with pytest.raises(UserError, match="IDLM-0449.*keeps 20 alternatives"):
        build_engine(toys[False], "block").generate([[1]], SamplingParams(logprobs=21))
