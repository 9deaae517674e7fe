"""An engine with a selector of drafts: greedy answers are those of AR, answers repeat, and files that do not
fit are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from idlm.contracts import SamplingParams
from idlm.errors import UserError
from idlm.infer.decoders.rejection import STRATEGIES
from idlm.infer.engine import Engine
from idlm.selector import SELECTOR_FILE
from tests.adapters import add_selector
from tests.contracts.engines import (
    CYCLE,
    answers,
    build_engine,
    greedy,
    prompts_of,
    tokens_per_forward,
    write_foreseeing_toy,
)

VOCABULARY, WIDTH = 48, 32


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = write_foreseeing_toy(tmp_path_factory.mktemp("toys") / "toy")
    return add_selector(directory, vocab_size=VOCABULARY, width=WIDTH)


def _engine(toy: Path, **options: object) -> Engine:
    return build_engine(toy, "isd", **{"stride": 4, **options})


@pytest.mark.sweep_but("branch")
@pytest.mark.parametrize("strategy", STRATEGIES.names())
def test_greedy_answers_are_those_of_ar(toy: Path, strategy: str) -> None:
    """Drafts differ from those of an engine without the selector."""
    prompts = prompts_of([21, 7, 14, 1, 28], vocab_size=CYCLE)
    expected = build_engine(toy, "ar").generate(prompts, greedy(max_tokens=24))
    found = _engine(toy, rejection_strategy=strategy, graphs="on").generate(prompts, greedy(max_tokens=24))
    plain = _engine(toy, rejection_strategy=strategy, selector=False)
    assert answers(found) == answers(expected)
    assert tokens_per_forward(found) != tokens_per_forward(plain.generate(prompts, greedy(max_tokens=24)))


def test_answers_depend_on_the_request_alone(toy: Path) -> None:
    """The same seeds on few lanes, on one, and after preemptions."""
    prompts = prompts_of([5, 1, 17, 8, 3, 12], vocab_size=CYCLE)
    params = [SamplingParams(max_tokens=16, seed=seed, temperature=0.8, top_p=0.9) for seed in range(6)]
    settings = ({"max_num_seqs": 3}, {"max_num_seqs": 1}, {"num_pages": 16})
    first, *others = (
        answers(_engine(toy, rejection_strategy="tree", **one).generate(prompts, params)) for one in settings
    )
    assert others == [first, first]


def test_a_selector_draws_no_drafts_of_the_published_rule(toy: Path) -> None:
    engine = _engine(toy, acceptance="published")
    assert engine.decoder.selector is None and _engine(toy).decoder.selector is not None


@pytest.mark.parametrize("fault", ["shape", "missing", "unknown", "broken", "absent", "kind"])
def test_a_selector_that_does_not_fit_is_refused(toy: Path, tmp_path: Path, fault: str) -> None:
    for path in toy.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    file = tmp_path / SELECTOR_FILE
    tensors = load_file(file)
    if fault == "shape":
        save_file({**tensors, "hidden_WD": torch.zeros(8, WIDTH + 1)}, file)
    elif fault == "missing":
        save_file({name: value for name, value in tensors.items() if name != "previous_VW"}, file)
    elif fault == "unknown":
        save_file({**tensors, "bias": torch.zeros(1)}, file)
    elif fault == "broken":
        file.write_bytes(b"not safetensors")
    elif fault == "absent":
        file.unlink()
    else:
        config = tmp_path / "idlm_config.json"
        config.write_text(config.read_text().replace('"path"', '"paths"'))
    with pytest.raises(UserError) as caught:
        _engine(tmp_path)
    assert caught.value.code == "IDLM-0621"
    assert _engine(tmp_path, selector=False).decoder.selector is None
