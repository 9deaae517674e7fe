"""Experts chosen by block (LLaDA2.2): answers do not depend on how passes are cut and mixed, and what would
compute a part of a block is refused. tests/numerics/test_family_parity.py has the slow reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from idlm.contracts import Completion
from idlm.errors import UserError
from idlm.semantics import Semantics
from tests.contracts.engines import assert_idle, build_engine, clear_answers, greedy
from tests.errors import refused
from tests.numerics.test_family_parity import BLOCK, MASK, llada22
from tests.toy import load_model

LENGTHS = (5 * BLOCK + 1, BLOCK, 3 * BLOCK - 1, 1, 2 * BLOCK)
PROMPTS = [
    [(7 * index + 5 * number) % MASK for index in range(length)] for number, length in enumerate(LENGTHS)
]
PARAMS = greedy(max_tokens=3 * BLOCK)
EXACT_MAGE = {"mage": {"k": 1 << 20, "exact_layers": 1}}
WAYS: dict[str, dict[str, Any]] = {
    "static": {"graphs": "on", "num_inflight_steps": 3},
    "prompts in chunks": {"max_num_batched_tokens": BLOCK},
    "preempted": {"num_pages": 12, "page_size": BLOCK},
    "pages that split blocks": {"page_size": 6, "prefix_cache": False},
    "commit alone": {"fused_commit": False},
    "mage, static": {"accelerators": EXACT_MAGE, "graphs": "on"},
}


def tokens(answers: list[Completion]) -> list[tuple[int, ...]]:
    return [tuple(answer.token_ids) for answer in answers]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("llada22")
    llada22(directory)
    return directory


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list[tuple[int, ...]]:
    answers = clear_answers(build_engine(checkpoint, "block"), PROMPTS, PARAMS)
    assert len({tuple(answer.token_ids) for answer in answers}) == len(PROMPTS)
    return tokens(answers)


@pytest.mark.sweep_but("prompts in chunks", "pages that split blocks")
@pytest.mark.decides
@pytest.mark.parametrize("way", WAYS)
def test_answers_do_not_depend_on_how_passes_are_made(
    way: str, checkpoint: Path, expected: list[tuple[int, ...]]
) -> None:
    engine = build_engine(checkpoint, "block", **WAYS[way])
    assert tokens(engine.generate(PROMPTS, PARAMS)) == expected
    assert_idle(engine)


def test_parts_of_a_block_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"(?s)IDLM-0460.*focus: .*choose experts together"):
        build_engine(checkpoint, "block", accelerators={"focus": {}})
    llada22(tmp_path, delete_token_id=None, split_token_id=None)
    refused(r"IDLM-0617.*dual_cache=true", build_engine, tmp_path, "block", sub_block_size=2, dual_cache=True)


def test_blocks_of_another_size_are_refused(tmp_path: Path) -> None:
    llada22(tmp_path)
    meaning = Semantics(causality="block", logit_shift=False, block_size=2 * BLOCK, mask_token_id=MASK)
    meaning.save(tmp_path)
    refused(r"IDLM-0617.*block_size=8 .*\(allowed: 4\)", load_model, tmp_path, device="cpu")


def test_tokens_of_edits_come_from_the_config_and_are_kept(checkpoint: Path, tmp_path: Path) -> None:
    meaning = load_model(checkpoint, device="cpu").semantics
    assert meaning.edit_token_ids == (91, 92) and meaning.block_size == BLOCK
    meaning.save(tmp_path)
    assert Semantics.load(tmp_path) == meaning
