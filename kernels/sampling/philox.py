"""Counter-based uniform numbers: one independent stream per request, the same on every device and batch.

Philox4x32-10 (Salmon et al., SC 2011), the generator behind `tl.philox`: a number is a pure function of
(request seed, sample index, sampling step, draw). Nothing is ever stored or advanced, so an answer cannot
depend on the rest of the batch, on preemption or on the order of draws, and no number is used twice.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_WORD = 0xFFFFFFFF
_ROUNDS = 10


def _philox4x32(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> Tensor:
    """First output word. All operands are int64 tensors that hold unsigned 32-bit words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        high0, low0 = _multiply(c0, _MULTIPLIERS[0])
        high1, low1 = _multiply(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _KEY_STEPS[0]) & _WORD, (k1 + _KEY_STEPS[1]) & _WORD
    return c0


def _multiply(word: Tensor, multiplier: int) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of a 32 x 32 bit product, without leaving signed int64."""
    low_half = (word & 0xFFFF) * multiplier
    high_half = (word >> 16) * multiplier + (low_half >> 16)
    return high_half >> 16, ((high_half & 0xFFFF) << 16) | (low_half & 0xFFFF)


def uniforms(seeds_B: Tensor, samples_B: Tensor, steps_B: Tensor, num_draws: int) -> Tensor:
    """Numbers in (0, 1), fp64 [B, num_draws], for one sampling step of B requests.

    `seeds_B` int64 (all 64 bits are key), `samples_B` int64 (which of a request's `n` samples), `steps_B`
    int64 (the request's own count of sampling steps). Draw d of step t is the same number however many
    draws are asked for.
    """
    draws_D = torch.arange(num_draws, device=seeds_B.device, dtype=torch.int64)
    shape = (len(seeds_B), num_draws)
    counter = (
        draws_D.expand(shape),
        steps_B[:, None].expand(shape) & _WORD,
        (steps_B[:, None].expand(shape) >> 32) & _WORD,
        samples_B[:, None].expand(shape) & _WORD,
    )
    key = (seeds_B[:, None] & _WORD, (seeds_B[:, None] >> 32) & _WORD)
    return (_philox4x32(counter, key).double() + 0.5) * 2.0**-32
