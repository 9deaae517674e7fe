"""Full diffusion on a CUDA device decides the tokens of the slow decoder, in fp32, with and without graphs,
with and without stored logits; the mapped arena grows and shrinks at one address."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from idlm.errors import UserError
from idlm.infer.mosaic.arena import MappedArena, open_arena
from idlm.kernels.masked_logits import has_fused, launch
from tests.contracts.full.canvases import ORDERS, PROMPTS, engine_of, expected_of, family, slow_canvas, spread  # noqa: F401 - `family` is a fixture
from tests.contracts.full.test_best_head import check_answers, greedy_cases

MIB = 1 << 20


@pytest.mark.parametrize("options", ORDERS[::5], ids=str)
def test_eager_passes_equal_the_slow_decoder(
    family: tuple[str, Path],  # noqa: F811
    options: dict[str, Any],
) -> None:
    kind, directory = family
    slow = slow_canvas(kind, options)
    cases = [expected_of(slow, number) for number in range(len(PROMPTS))]
    engine = engine_of(directory, options, graphs="off", device="cuda")
    found = engine.generate(PROMPTS, [params for params, _, _ in cases])
    assert [done.token_ids for done in found] == [tokens for _, tokens, _ in cases]


IN_GRAPHS = [(*case, {"graphs": "on"}) for case in spread(ORDERS)]
IN_A_WORKSPACE = [(*case, {"memory": "mosaic"}) for case in spread(ORDERS[1::2])]


@pytest.mark.parametrize(
    ("family", "options", "settings"), IN_GRAPHS + IN_A_WORKSPACE, indirect=["family"], ids=str
)
def test_greedy_passes_store_no_logits_and_decide_the_same(
    family: tuple[str, Path],  # noqa: F811
    options: dict[str, Any],
    settings: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Greedy requests alone, then among warm and truncated ones; topk_margin needs logits."""
    kind, directory = family
    slow = slow_canvas(kind, options)
    cases, mixed = greedy_cases(slow), [expected_of(slow, number) for number in range(len(PROMPTS))]
    launches, run = [], launch.run

    def counted(*args: Any, **kwargs: Any) -> Any:
        launches.append(kwargs["workspace"] is not None)
        return run(*args, **kwargs)

    monkeypatch.setattr(launch, "run", counted)
    engine = engine_of(directory, options, device="cuda", **settings)
    check_answers(engine, cases)
    is_served = options["order"] != "topk_margin" and has_fused(torch.device("cuda", 0))
    assert set(launches) == ({"memory" in settings} if is_served else set())
    found = engine.generate(PROMPTS, [params for params, _, _ in mixed])
    assert [done.token_ids for done in found] == [tokens for _, tokens, _ in mixed]
    check_answers(engine, cases)


@pytest.mark.alone
def test_the_mapped_arena_takes_what_it_says_at_one_address() -> None:
    arena = open_arena("mapped", torch.device("cuda"))
    assert isinstance(arena, MappedArena)
    float(torch.full((MIB,), 3.0, device="cuda")[-1])  # the code of these operations takes memory once
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0]
    addresses = set()
    for size in (64, 4096, 300, 8192, 2):
        arena.resize(size * MIB)
        view = arena.view(0, (size * MIB // 4,), torch.float32)
        view.fill_(3.0)
        assert float(view[-1]) == 3.0
        addresses.add(view.data_ptr())
        assert free - torch.cuda.mem_get_info()[0] == size * MIB
    assert len(addresses) == 1
    with pytest.raises(UserError, match="IDLM-0466"):
        arena.resize(torch.cuda.mem_get_info()[1] + MIB)
    assert arena.num_bytes == 2 * MIB
    del view
    arena.close()
    assert torch.cuda.mem_get_info()[0] == free
