"""The random streams: known answers, no reuse, no dependence on the batch."""

from __future__ import annotations

import torch

from idlm.kernels.sampling import uniforms
from idlm.kernels.sampling.draws import philox4x32


def _words(*values: int) -> tuple[torch.Tensor, ...]:
    return tuple(torch.tensor([value]) for value in values)


def test_philox_known_answers() -> None:
    """The known-answer vectors of Random123 for philox4x32-10, first word."""
    cases = [
        ((0, 0, 0, 0), (0, 0), 0x6627E8D5),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, 0x408F276D),
        ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0), 0xD16CFE09),
    ]
    for counter, key, expected in cases:
        assert philox4x32(_words(*counter), _words(*key))[0].item() == expected  # type: ignore[arg-type]


def test_numbers_do_not_depend_on_the_batch_or_on_how_many_are_drawn() -> None:
    seeds, samples, steps = torch.arange(50) * 7919, torch.arange(50) % 3, torch.arange(50) * 11
    together = uniforms(seeds, samples, steps, 9)
    for b in (0, 17, 49):
        alone = uniforms(seeds[b : b + 1], samples[b : b + 1], steps[b : b + 1], 4)
        assert torch.equal(alone[0], together[b, :4])


def test_no_number_is_used_twice_over_requests_samples_steps_and_draws() -> None:
    """A million words of 32 bits: collisions at the birthday rate (116 expected), far below any reuse."""
    seeds = torch.arange(20).repeat_interleave(5000)
    samples = torch.arange(4).repeat_interleave(1250).repeat(20)
    steps = torch.arange(1250).repeat(80)
    numbers = uniforms(seeds, samples, steps, 10).flatten()
    assert len(numbers) - len(numbers.unique()) < 200


def test_seeds_above_32_bits_differ() -> None:
    zero = torch.zeros(2, dtype=torch.int64)
    first, second = uniforms(torch.tensor([1, 1 + 2**40]), zero, zero, 8)
    assert not torch.equal(first, second)
