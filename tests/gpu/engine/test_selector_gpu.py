"""A selector of drafts on a CUDA device: the law, and passes that are graphs against ones that are not."""

from __future__ import annotations

from pathlib import Path

import pytest

from idlm.contracts import SamplingParams
from tests.adapters import add_selector
from tests.contracts import engines
from tests.law import harness
from tests.law.test_selector_law import LEVEL, WARPED, WIDTH
from tests.law.test_selector_law import selected as selected

pytestmark = pytest.mark.usefixtures("on_the_gpu")


@pytest.fixture(scope="module")
def law_toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return harness.write_law_toy(tmp_path_factory.mktemp("law_toy"))


@pytest.mark.parametrize("strategy", ["tree", "branch"])
def test_the_law_on_a_gpu(law_toy: Path, selected: Path, strategy: str) -> None:
    engine = harness.build_engine(selected, "isd", stride=4, rejection_strategy=strategy)
    found = harness.fits(law_toy, harness.sample(engine, WARPED, 20_000))
    assert len(found) == 2 * len(WARPED) and WIDTH == 8
    assert not harness.misfits(found, LEVEL), found


def test_graphs_give_the_answers_of_eager_passes(tmp_path: Path) -> None:
    toy = add_selector(engines.write_converted_toy(tmp_path / "toy"), vocab_size=48, width=32)
    prompts = engines.prompts_of([5, 17, 9, 30])
    drawn = [SamplingParams(max_tokens=40, seed=seed, temperature=0.8, top_p=0.9) for seed in range(4)]
    greedy = [SamplingParams(max_tokens=40, temperature=0)] * 4
    expected = engines.build_engine(toy, "ar").generate(prompts, greedy)
    answers = {}
    for graphs in ("on", "off"):
        engine = engines.build_engine(toy, "isd", stride=4, graphs=graphs)
        assert engine.settings.graphs == graphs
        answers[graphs] = engines.answers(engine.generate(prompts, drawn))
        assert engines.answers(engine.generate(prompts, greedy)) == engines.answers(expected)
    assert answers["on"] == answers["off"]
