"""Both arenas: grow, shrink, refusals, views, and nothing left behind; the mapped one on a fake driver."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator

import pytest
import torch

from idlm.infer.mosaic.arena import AUTO, MAPPED, PLAIN, Arena, MappedArena, PlainArena, open_arena, view_of
from tests.errors import refused
from tests.unit.planning.fake_driver import PAGE, FakeDriver

CARD = 32 * PAGE
CPU = torch.device("cpu")


def mapped(driver: FakeDriver) -> MappedArena:
    return MappedArena(driver, CARD - 5, max_extent_bytes=4 * PAGE)


@pytest.fixture(params=[PLAIN, MAPPED])
def arena(request: pytest.FixtureRequest) -> Iterator[Arena]:
    driver = FakeDriver(CARD)
    made: Arena = PlainArena(CPU) if request.param == PLAIN else mapped(driver)
    yield made
    made.close()
    made.close()
    assert driver.is_clean


def test_an_arena_holds_what_is_asked_for(arena: Arena) -> None:
    assert arena.num_bytes == 0
    for num_bytes in (5 * PAGE, 11 * PAGE + 1, 3 * PAGE, 0, 7 * PAGE, 6 * PAGE):
        arena.resize(num_bytes)
        assert arena.num_bytes >= num_bytes
        if num_bytes:
            rows = num_bytes // 1024
            view = arena.view(512, (rows - 1, 256), torch.float32)
            view.fill_(1.5)
            assert view.shape == (rows - 1, 256) and view.is_contiguous()
            assert float(view[-1, -1]) == 1.5


def test_views_share_bytes_and_stay_inside(arena: Arena) -> None:
    arena.resize(PAGE)
    arena.view(1024, (4, 8), torch.int64).copy_(torch.arange(32).view(4, 8))
    assert arena.view(1024, (32,), torch.int64).tolist() == list(range(32))
    assert (
        arena.view(512, (64,), torch.float64).data_ptr() + 512
        == arena.view(1024, (1,), torch.int8).data_ptr()
    )
    assert arena.view(PAGE, (0, 5), torch.float32).numel() == 0
    for offset, shape in ((512, (PAGE,)), (100, (1,)), (-512, (1,)), (512, (-1,))):
        with pytest.raises(AssertionError):
            arena.view(offset, shape, torch.uint8)


def test_a_plain_arena_shrinks_only_when_half_is_unused() -> None:
    arena = PlainArena(CPU)
    arena.resize(10 * PAGE)
    arena.resize(6 * PAGE)
    assert arena.num_bytes == 10 * PAGE
    arena.resize(4 * PAGE)
    assert arena.num_bytes == 4 * PAGE


def test_a_plain_arena_that_cannot_grow_keeps_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    arena = PlainArena(CPU)
    arena.resize(PAGE)
    allocate = arena._allocate

    def refuse(num_bytes: int) -> torch.Tensor:
        if num_bytes > 2 * PAGE:
            raise torch.OutOfMemoryError("no memory")
        return allocate(num_bytes)

    monkeypatch.setattr(arena, "_allocate", refuse)
    refused(rf"IDLM-0466.*from {PAGE} to {3 * PAGE} bytes", arena.resize, 3 * PAGE)
    assert arena.num_bytes == PAGE and arena.view(0, (PAGE,), torch.uint8).numel() == PAGE


def test_a_mapped_arena_keeps_its_address_and_maps_what_is_planned() -> None:
    driver = FakeDriver(CARD)
    arena = mapped(driver)
    assert arena.reserved_bytes == CARD and not driver.bytes_created
    rng, addresses = random.Random(0), set()
    for _ in range(200):
        num_bytes = rng.randrange(1, CARD)
        arena.resize(num_bytes)
        assert arena.num_bytes == driver.bytes_created == -(-num_bytes // PAGE) * PAGE
        addresses.add(arena.view(0, (1,), torch.uint8).data_ptr())
    assert len(addresses) == 1
    assert len(driver.mapped) <= 200 and driver.num_cache_flushes < 200
    arena.close()
    assert driver.is_clean


def test_more_than_the_card_is_refused_before_anything_is_unmapped() -> None:
    driver = FakeDriver(CARD)
    arena = mapped(driver)
    arena.resize(2 * PAGE)
    arena.view(0, (1,), torch.uint8).fill_(7)
    refused("IDLM-0466", arena.resize, CARD + 1)
    assert arena.num_bytes == 2 * PAGE and arena.view(0, (1,), torch.uint8).item() == 7
    arena.close()


@pytest.mark.parametrize("num_calls", range(9))
def test_a_mapping_that_fails_at_any_call_is_undone(num_calls: int) -> None:
    driver = FakeDriver(CARD)
    arena = mapped(driver)
    arena.resize(6 * PAGE)
    driver.refuse_after = num_calls
    refused(r"IDLM-0466.*(cuMemCreate|cuMemMap|cuMemSetAccess) failed", arena.resize, 17 * PAGE)
    assert arena.num_bytes == driver.bytes_created == 6 * PAGE
    assert arena.view(0, (6 * PAGE,), torch.uint8).numel() == 6 * PAGE
    arena.resize(17 * PAGE)
    assert driver.bytes_created == 17 * PAGE
    arena.close()
    assert driver.is_clean


@pytest.mark.parametrize("num_calls", range(3))
def test_shrinking_can_fail_and_leaves_no_memory_behind(num_calls: int) -> None:
    """The last extent is replaced by a smaller one; if that is refused, the arena ends before it."""
    driver = FakeDriver(CARD)
    arena = mapped(driver)
    arena.resize(8 * PAGE)
    driver.refuse_after = num_calls
    refused("IDLM-0466", arena.resize, 6 * PAGE)
    assert arena.num_bytes == driver.bytes_created == 4 * PAGE
    arena.resize(6 * PAGE)
    arena.close()
    assert driver.is_clean


def test_an_arena_without_the_driver_is_plain_and_says_so(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with caplog.at_level(logging.WARNING):
        assert isinstance(open_arena(MAPPED, CPU), PlainArena)
    assert "arena=plain is used: cpu is not a CUDA device" in caplog.text
    caplog.clear()
    for kind in (PLAIN, AUTO):
        assert isinstance(open_arena(kind, CPU), PlainArena) and not caplog.text


def test_views_of_more_elements_than_32_bits_count() -> None:
    base = torch.empty(12 << 30, dtype=torch.uint8, device="meta")
    view = view_of(base, 5 << 30, (700_000, 4096), torch.bfloat16)
    assert view.numel() > 2**31 and view.storage_offset() * 2 == 5 << 30
    assert view[600_000:].storage_offset() > 2**32
