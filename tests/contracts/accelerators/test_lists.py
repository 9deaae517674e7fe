"""Lists in the engine: pages that are swapped under them, and the plans and launches of their passes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from idlm.infer.accelerators import quest
from idlm.infer.state.page_pool import PagePool
from tests.contracts.accelerators.cases import PROMPTS, SIZE, THIN, engine_of, tokens
from tests.contracts.engines import assert_idle, clear_answers, drain, greedy


@pytest.mark.sweep
@pytest.mark.decides
@pytest.mark.parametrize(("name", "graphs"), [("quest", "off"), ("quest", "on"), ("mage", "on")])
def test_pages_are_swapped_in_front_of_a_block_that_is_being_decided(
    toys: dict[str, Path], name: str, graphs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal prompts, greedy, started three passes apart: the later ones take over the pages of the first,
    block by block, while lists of the next block are in use. Pages that become free hold NaN at once."""
    prompt, params = PROMPTS[4], greedy(max_tokens=5 * SIZE)
    settings: dict[str, Any] = {"accelerators": {name: THIN[name]}, "page_size": SIZE, "steps": SIZE}
    alone = engine_of(toys, **settings, prefix_cache=False)
    [expected] = tokens(clear_answers(alone, [prompt], params))
    engine = engine_of(toys, **settings, graphs=graphs)
    memory, num_swapped, release = engine._parts.runner._cache, 0, PagePool._decref

    def releasing(pool: PagePool, page: int) -> None:
        nonlocal num_swapped
        release(pool, page)
        if pool._free[-1:] == [page]:
            num_swapped += engine.has_work
            for slots in (memory.keys, memory.values):
                slots[:, page * SIZE : (page + 1) * SIZE] = torch.nan

    monkeypatch.setattr(PagePool, "_decref", releasing)
    found: dict[str, tuple[int, ...]] = {}
    for number in range(3):
        engine.add_request(str(number), prompt, params)
        events = [event for _ in range(3) for event in engine.step()]
        found |= {e.request_id: e.completion.token_ids for e in events if e.completion is not None}
    found |= {name: done.token_ids for name, done in drain(engine).items()}
    assert found == {str(number): expected for number in range(3)}
    assert num_swapped >= 6, "no page was swapped"
    assert_idle(engine)


def test_quest_scores_no_page_behind_the_table(
    toys: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The block of a sequence that prefills begins behind the slots that a pass has pages for."""
    scored, scores = [], quest.page_scores

    def checked(q_RNH: Any, rows_BW: Any, bounds: Any, starts_B: Any, slots: Any, **sizes: Any) -> Any:
        assert int(starts_B.max()) <= slots.block_table_BP.shape[1] * slots.page_size
        scored.append(int(starts_B.max()))
        return scores(q_RNH, rows_BW, bounds, starts_B, slots, **sizes)

    monkeypatch.setattr(quest, "page_scores", checked)
    engine = engine_of(toys, accelerators={"quest": THIN["quest"]}, max_num_batched_tokens=SIZE)
    [done] = engine.generate([[1 + number % 30 for number in range(9 * SIZE)]], greedy(max_tokens=SIZE))
    assert len(done.token_ids) == SIZE and {0, 9 * SIZE} <= set(scored)
