"""The definition of the op in fp64, one row and one token at a time.

The random numbers are Philox4x32-10 (Salmon et al., SC 2011); that the argmax of logits plus Gumbel noise
follows the softmax is Gumbel's (1954), used by LLaDA (arXiv 2502.09992) for its draws.
Shapes: R rows of the pass, X wanted rows, V vocabulary, D width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from idlm.kernels.masked_logits.types import Draws, Proposals

GROUP, WORDS = 256, 64
_WORD = 0xFFFFFFFF


def philox_words(seed: int, counter: Sequence[int]) -> list[int]:
    """Four 32-bit words of a 64-bit seed and a counter of four words."""
    c0, c1, c2, c3 = (word & _WORD for word in counter)
    k0, k1 = seed & _WORD, (seed >> 32) & _WORD
    for _ in range(10):
        high, low = divmod(0xD2511F53 * c0, 1 << 32)
        other_high, other_low = divmod(0xCD9E8D57 * c2, 1 << 32)
        c0, c1, c2, c3 = other_high ^ c1 ^ k0, other_low, high ^ c3 ^ k1, low
        k0, k1 = (k0 + 0x9E3779B9) & _WORD, (k1 + 0xBB67AE85) & _WORD
    return [c0, c1, c2, c3]


def gumbel(seed: int, sample: int, step: int, token: int) -> float:
    """-ln(-ln(1 - v)) of the token's number v in (0, 1)."""
    counter = (1 << 31) + token // GROUP * WORDS + token % WORDS
    word = philox_words(seed, (counter, step, step >> 32, sample))[token % GROUP // WORDS]
    return -math.log(-math.log1p(-(word + 0.5) / 2**32))


def masked_logits_reference(
    hidden_RD: Tensor,
    rows_X: Tensor,
    weight_VD: Tensor,
    *,
    draws: Draws | None = None,
    forbidden_ids: Sequence[int] = (),
) -> Proposals:
    """See `masked_logits`; logits are not rounded."""
    found = []
    for place, row in enumerate(rows_X.tolist()):
        settings = (0.0, 0, 0, 0)
        if draws is not None:
            numbers = (int(one[place]) for one in (draws.seeds_X, draws.samples_X, draws.steps_X))
            seed, sample, step = numbers
            settings = (float(draws.temperature_X[place]), seed, sample, step)
        logits = [] if row < 0 else (weight_VD.double() @ hidden_RD[row].double()).tolist()
        found.append(_row(logits, settings, set(forbidden_ids)) if logits else (0, 0.0, 0.0, False, 0.0))
    values = list(zip(*found, strict=True)) or [()] * 5
    double = [torch.tensor(values[number], dtype=torch.float64) for number in (1, 2, 4)]
    return Proposals(
        token_X=torch.tensor(values[0], dtype=torch.int64),
        own_X=double[0],
        confidence_X=double[1],
        is_nonfinite_X=torch.tensor(values[3], dtype=torch.bool),
        entropy_X=double[2],
    )


def _row(
    logits: list[float], settings: tuple[float, int, int, int], forbidden: set[int]
) -> tuple[int, float, float, bool, float]:
    """(token, own probability, confidence, whether there is no distribution, entropy)."""
    temperature, seed, sample, step = settings
    allowed = {token: logit for token, logit in enumerate(logits) if token not in forbidden}
    largest = max(allowed.values(), default=-math.inf)
    if not math.isfinite(largest) or any(math.isnan(logit) for logit in allowed.values()):
        return 0, 0.0, 0.0, True, 0.0
    own = _softmax(allowed, largest, 1.0)
    entropy = -sum(p * math.log(p) for p in own.values() if p > 0)
    if temperature == 0:
        token = min(token for token, logit in allowed.items() if logit == largest)
        return token, own[token], own[token], False, entropy
    keys = {t: logit / temperature + gumbel(seed, sample, step, t) for t, logit in allowed.items()}
    token = max(keys, key=lambda one: (keys[one], -one))
    return token, own[token], _softmax(allowed, largest, temperature)[token], False, entropy


def _softmax(logits: dict[int, float], largest: float, temperature: float) -> dict[int, float]:
    weights = {token: math.exp((logit - largest) / temperature) for token, logit in logits.items()}
    total = sum(weights.values())
    return {token: weight / total for token, weight in weights.items()}
