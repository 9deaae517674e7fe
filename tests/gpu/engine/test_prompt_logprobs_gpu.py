"""Log-probabilities of prompts on a CUDA device with graphs: tests/numerics/test_prompt_logprobs.py,
unchanged but for the tolerance."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.numerics import test_prompt_logprobs
from tests.numerics.test_prompt_logprobs import (
    DECODERS,
    FAMILIES,
    tables,
    test_a_pass_that_fails_is_scored_again,
    test_an_aborted_request_has_what_was_computed,
    test_an_answer_of_no_tokens,
)

__all__ = [
    "tables",
    "test_a_pass_that_fails_is_scored_again",
    "test_an_aborted_request_has_what_was_computed",
    "test_an_answer_of_no_tokens",
]
pytestmark = pytest.mark.usefixtures("on_the_gpu")


@pytest.fixture(autouse=True)
def _rounding_of_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_prompt_logprobs, "TOLERANCE", 5e-3)


@pytest.mark.parametrize(
    ("family", "decoder", "options"),
    [(family, *DECODERS[number % 2]) for number, family in enumerate(FAMILIES)],
    ids=str,
)
def test_they_are_those_of_the_reference_model(
    tmp_path: Path, family: str, decoder: str, options: dict[str, Any]
) -> None:
    test_prompt_logprobs.test_they_are_those_of_the_reference_model(tmp_path, family, decoder, options)
