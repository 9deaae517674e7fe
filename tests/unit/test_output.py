"""Records of an output file are JSON for every reader, whatever numbers a model has given."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from idlm.contracts import Completion, TokenLogprob
from idlm.infer.answers import figures
from idlm.infer.output import answer_file


def _refuse(constant: str) -> None:
    pytest.fail(f"{constant} is no JSON")


def test_log_probabilities_that_are_no_numbers_are_null(tmp_path: Path) -> None:
    done = Completion(
        request_id="a",
        index=0,
        text="x",
        token_ids=(5, 6),
        finish_reason="length",
        num_prompt_tokens=1,
        num_forwards=2,
        logprobs=(
            TokenLogprob(token_id=5, logprob=math.nan, top={5: math.nan}),
            TokenLogprob(token_id=6, logprob=-0.5, top={6: -0.5, 7: -math.inf}),
        ),
    )
    with answer_file(str(tmp_path / "out")) as answers:
        answers.write(figures(done))
    record = json.loads((tmp_path / "out").read_text(), parse_constant=_refuse)
    assert record["logprobs"] == [
        {"token_id": 5, "logprob": None, "top": {"5": None}},
        {"token_id": 6, "logprob": -0.5, "top": {"6": -0.5, "7": None}},
    ]
    assert (record["token_ids"], record["tokens_per_forward"]) == ([5, 6], 1.0)
