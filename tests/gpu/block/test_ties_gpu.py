"""The order of exact ties on a CUDA device: tests/unit/engine/test_ties.py, unchanged."""

from __future__ import annotations

import pytest

from tests.unit.engine.test_ties import (
    test_of_equal_experts_and_groups_the_lower_number_is_chosen,
    test_of_equal_logprobs_the_lower_id_is_reported_first,
    test_of_equal_slots_an_accelerator_keeps_the_first_at_any_prefix,
    test_of_equally_confident_places_the_left_one_is_decided_first,
    test_of_equally_likely_tokens_greedy_decoding_takes_the_lowest_id,
)

__all__ = [
    "test_of_equal_experts_and_groups_the_lower_number_is_chosen",
    "test_of_equal_logprobs_the_lower_id_is_reported_first",
    "test_of_equal_slots_an_accelerator_keeps_the_first_at_any_prefix",
    "test_of_equally_confident_places_the_left_one_is_decided_first",
    "test_of_equally_likely_tokens_greedy_decoding_takes_the_lowest_id",
]


@pytest.fixture
def device() -> str:
    return "cuda"
