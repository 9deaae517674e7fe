"""Draws from rows of probabilities, and scores of these: confidence, entropy, lead of the best token.

`row_entropy` and `row_margin` are plain torch on every device, over [X, V] in fp32 on a GPU and fp64 on a
CPU: callers pass slices. Contract in README.md. Shapes: X rows, V vocabulary, B sequences, D draws."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from idlm.kernels import backend
from idlm.kernels.sampling.types import ChunkShape, PlainProbs, Probs, RowProbs

MAX_DRAWS = 128
"""Philox numbers of a program of one warp. 16,384 took 25 s to compile and 3.3 GB of spills on an H200."""
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_WORD = 0xFFFFFFFF
_ROUNDS = 10


def uniforms(
    seeds: Tensor,
    samples: Tensor,
    steps: Tensor,
    num_draws: int,
    *,
    lanes_B: Tensor | None = None,
    steps_by_lane: bool = True,
) -> Tensor:
    """Numbers in (0, 1), fp64 [B, num_draws]: Philox4x32-10 (Salmon et al., SC 2011), the generator of
    `tl.philox`, of (seed, sample, step, draw), int64 tensors.

    One entry per sequence, or, with `lanes_B`, per lane (steps only if `steps_by_lane`). Devices agree
    exactly. A number is a pure function of the four: nothing is stored or advanced, so an answer cannot
    depend on the rest of the batch, on preemption or on the order of draws, and no number is used twice. All
    64 bits of the seed are key."""
    if not backend.has_kernels(seeds.device):
        if lanes_B is not None:
            seeds, samples = seeds[lanes_B], samples[lanes_B]
            steps = steps[lanes_B] if steps_by_lane else steps
        draws_D = torch.arange(num_draws, device=seeds.device)
        words_BD = random_words(seeds[:, None], samples[:, None], steps[:, None], draws_D)
        return (words_BD.double() + 0.5) * 2.0**-32
    import triton

    from idlm.kernels.sampling import kernel

    num_sequences = len(seeds if lanes_B is None else lanes_B)
    out_BD = torch.empty(num_sequences, num_draws, dtype=torch.float64, device=seeds.device)
    tile = min(MAX_DRAWS, triton.next_power_of_2(num_draws))
    if out_BD.numel():
        kernel.uniforms_kernel[(num_sequences, triton.cdiv(num_draws, tile))](
            *(seeds, samples, steps, lanes_B, out_BD, num_draws),
            STEP_BY_LANE=steps_by_lane,
            TILE=tile,
            num_warps=1,
        )
    return out_BD


def random_words(seeds: Tensor, samples: Tensor, steps: Tensor, draws: Tensor) -> Tensor:
    """Draws of a stream as integers below 2^32, int64; operands (int64) are broadcast."""
    counter = torch.broadcast_tensors(draws, steps & _WORD, (steps >> 32) & _WORD, samples & _WORD)
    return philox4x32(counter, (seeds & _WORD, (seeds >> 32) & _WORD))[0]


def philox4x32(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The four output words. All operands are int64 tensors that hold unsigned 32-bit words.

    Few operations, because launching one takes longer than the sums of a batch: words 0 and 2, which a round
    multiplies, are one tensor, and so are words 1 and 3. A product fills 64 bits, and its sign bit does not
    reach the bits that are taken."""
    multiplied, added = torch.stack(counter).unflatten(0, (2, 2)).unbind(1)
    keys = torch.stack(key)
    # Without a copy from the host, which a CUDA graph cannot hold.
    half = torch.arange(2, device=keys.device).view(2, *[1] * counter[0].dim())
    multipliers, steps = (first + half * (second - first) for first, second in (_MULTIPLIERS, _KEY_STEPS))
    for _ in range(_ROUNDS):
        product = (multiplied * multipliers).flip(0)
        multiplied = (product >> 32) & _WORD ^ added ^ keys
        added, keys = product & _WORD, (keys + steps) & _WORD
    return multiplied[0], added[0], multiplied[1], added[1]


def draw(probs: Probs, rows_B: Tensor, uniforms_B: Tensor) -> Tensor:
    """One token (int64 [B]) per row by inversion of a uniform number in (0, 1); 0 for row -1."""
    if isinstance(probs, PlainProbs):
        return torch.where(rows_B >= 0, invert(probs.probs_XV[rows_B.clamp(min=0)], uniforms_B), 0)
    from idlm.kernels.sampling import kernel

    shape, rows_B = ChunkShape(probs.logits_XV.shape[1], probs.tuning), rows_B.contiguous()
    out_B = torch.empty_like(rows_B)
    if len(rows_B):
        kernel.draw_kernel[(len(rows_B),)](
            *(probs.tensors(), rows_B, uniforms_B, out_B),
            (probs.logits_XV.stride(0), uniforms_B.stride(0), probs.logits_XV.shape[1], shape.num_chunks),
            CHUNK=shape.chunk,
            CHUNKS=shape.chunks,
            num_warps=4,
        )
    return out_B


def judged_draws(
    probs: Probs,
    uniforms_X: Tensor,
    temperature: Tensor,
    *,
    lanes_B: Tensor | None = None,
    takes_best_X: Tensor | None = None,
    always_own: bool = False,
) -> tuple[Tensor, Tensor]:
    """A token (int64 [X]) of every row and its confidence (fp64 [X]); `probs` must be computed with `own`.

    The token is drawn by inversion of a number in (0, 1), or is the most likely one (lowest id) where
    `takes_best_X` (bool). The confidence is its probability in the row's distribution, or in the model's own
    if the row is greedy (settings as in `row_probs`) or `always_own`."""
    assert len(uniforms_X) == len(probs) and uniforms_X.is_contiguous(), f"{uniforms_X.shape=}"
    if isinstance(probs, PlainProbs):
        assert probs.own_XV is not None and probs.best_X is not None, "these probs lack the model's own"
        if lanes_B is not None:
            temperature = temperature[lanes_B].repeat_interleave(len(probs) // max(1, len(lanes_B)))
        ids_X = invert(probs.probs_XV, uniforms_X)
        if takes_best_X is not None:
            ids_X = torch.where(takes_best_X, probs.best_X, ids_X)
        index_X1 = ids_X[:, None]
        probs_X, own_X = probs.probs_XV.gather(1, index_X1)[:, 0], probs.own_XV.gather(1, index_X1)[:, 0]
        return ids_X, torch.where((temperature == 0) | always_own, own_X, probs_X)
    from idlm.kernels.sampling import kernel

    num_rows, num_tokens = probs.logits_XV.shape
    shape, device = ChunkShape(num_tokens, probs.tuning), probs.logits_XV.device
    ids_X = torch.empty(num_rows, dtype=torch.int64, device=device)
    confidence_X = torch.empty(num_rows, dtype=torch.float64, device=device)
    rows_per_lane = 1 if lanes_B is None else num_rows // max(1, len(lanes_B))
    if num_rows:
        kernel.judged_kernel[(num_rows,)](
            *(probs.tensors(), uniforms_X, temperature, lanes_B, takes_best_X, (ids_X, confidence_X)),
            (probs.logits_XV.stride(0), num_tokens, shape.num_chunks, rows_per_lane),
            ALWAYS_OWN=always_own,
            CHUNK=shape.chunk,
            CHUNKS=shape.chunks,
            num_warps=4,
        )
    return ids_X, confidence_X


def invert(probs_MV: Tensor, uniforms_M: Tensor) -> Tensor:
    """Inversion; a token of zero mass is never drawn. Rows need not sum to 1."""
    cumulative_MV = probs_MV.cumsum(-1)
    target_M1 = uniforms_M[:, None] * cumulative_MV[:, -1:]
    return (cumulative_MV <= target_M1).sum(-1)


def entropy(probs: Probs) -> Tensor:
    """Entropy (nats, fp64 [X]) of every row at temperature 1 without filters; needs `own`."""
    if isinstance(probs, RowProbs):
        return probs.numbers_XF[:, 7]
    assert probs.own_XV is not None, "these probs lack the model's own"
    return torch.special.entr(probs.own_XV).sum(-1)


def row_entropy(probs: Probs, takes_own_X: Tensor) -> Tensor:
    """Entropy (nats, fp64 [X]) of every row's distribution, or of the model's own (temperature 1, no filters)
    where `takes_own_X` (bool). `probs` must be computed with `own`."""
    if isinstance(probs, PlainProbs):
        return torch.special.entr(_plain(probs, takes_own_X)).sum(-1)
    weights_XV, exponents_XV = _weights(probs, takes_own_X)
    mass_X = weights_XV.double().sum(-1)
    # entropy = ln mass - sum(w ln w) / mass, with exponents in powers of two.
    mean_X = torch.where(weights_XV > 0, weights_XV * exponents_XV, 0.0).double().sum(-1) / mass_X
    return mass_X.log() - math.log(2) * mean_X


def row_margin(probs: Probs, takes_own_X: Tensor) -> Tensor:
    """Difference (fp64 [X]) of the two largest probabilities of every row; see `row_entropy`."""
    if isinstance(probs, PlainProbs):
        best_X2 = _plain(probs, takes_own_X).topk(2, dim=-1).values
        return best_X2[:, 0] - best_X2[:, 1]
    weights_XV, _ = _weights(probs, takes_own_X)
    best_X2 = weights_XV.topk(2, dim=-1).values.double()
    return (best_X2[:, 0] - best_X2[:, 1]) / weights_XV.double().sum(-1)


def _plain(probs: PlainProbs, takes_own_X: Tensor) -> Tensor:
    assert probs.own_XV is not None, "these probs lack the model's own"
    return torch.where(takes_own_X[:, None], probs.own_XV, probs.probs_XV)


def _weights(probs: Probs, takes_own_X: Tensor) -> tuple[Tensor, Tensor]:
    """Unnormalised probabilities [X, V] relative to the largest, 0 for dropped tokens; their exponents."""
    assert not isinstance(probs, PlainProbs)
    max_X, scale_X, threshold_X, tie_id_X = probs.numbers_XF[:, :4].unbind(1)
    scale_X = torch.where(takes_own_X, math.log2(math.e), scale_X)
    logits_XV = probs.logits_XV.float()
    exponents_XV = (logits_XV - max_X[:, None].float()) * scale_X[:, None].float()
    ids_V = torch.arange(logits_XV.shape[1], device=logits_XV.device)
    threshold_X1 = threshold_X[:, None].float()
    is_kept_XV = (logits_XV > threshold_X1) | ((logits_XV == threshold_X1) & (ids_V <= tie_id_X[:, None]))
    is_kept_XV |= takes_own_X[:, None]
    return torch.where(is_kept_XV, exponents_XV.exp2(), 0.0), exponents_XV
