"""Steps of the native arms: `native_fp64`, `native`, `compile`, `masked`, `compile_masked`.

Each decides one mask of a canvas by low confidence at temperature 0. `native_fp64` follows LLaDA's older
generate.py (softmax of all logits in fp64), `native` today's (bf16 logits and softmax). `masked` computes
logits of masks only and no softmax: the confidence is exp(max - logsumexp). `compile` and `compile_masked`
compile the whole step, model and sampler, with dynamic shapes, so that the compiler may fuse the softmax.
Shapes: B canvases (1), L places, M masks, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.engine.canvas.models import num_masks
from benchmarks.engine.canvas.native import NativeModel

NATIVE_ARMS = ("native_fp64", "native", "compile", "masked", "compile_masked")
CHUNK_BYTES = 64 << 20
"""Bytes of the fp32 copy of one chunk of logits in the fused confidence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Canvas:
    """Token ids [1, L] and the places of the masks [M], on the device of the model."""

    ids_BL: Tensor
    places_M: Tensor


def random_canvas(
    length: int, prompt_share: float, *, vocab: int, mask_id: int, device: torch.device, seed: int = 0
) -> Canvas:
    """A prompt of random tokens, then masks."""
    masks = num_masks(length, prompt_share)
    generator = torch.Generator(device).manual_seed(seed)
    ids_BL = torch.randint(vocab - 1, (1, length), generator=generator, device=device)
    # An id from the mask's on moves up by one, so that no token of the prompt is the mask.
    ids_BL += ids_BL >= mask_id
    places_M = torch.arange(length - masks, length, device=device)
    ids_BL[:, places_M] = mask_id
    return Canvas(ids_BL=ids_BL, places_M=places_M)


Proposals = tuple[Tensor, Tensor]
"""Tokens [M] and confidences [M] (fp32 or wider) of the masks."""
Propose = Callable[[Tensor, Tensor], Proposals]


def proposals_of_all(
    model: NativeModel, ids_BL: Tensor, places_M: Tensor, *, is_shifted: bool, dtype: torch.dtype | None
) -> Proposals:
    """Tokens and confidences by a softmax of the logits of all places, in `dtype` (None: the model's)."""
    logits_BLV = model(ids_BL)
    if is_shifted:
        logits_BLV = torch.cat((logits_BLV[:, :1], logits_BLV[:, :-1]), dim=1)
    tokens_BL = logits_BLV.argmax(-1)
    probs_BLV = torch.softmax(logits_BLV if dtype is None else logits_BLV.to(dtype), dim=-1)
    confidence_BL = probs_BLV.gather(-1, tokens_BL[..., None])[..., 0]
    return tokens_BL[0, places_M], confidence_BL[0, places_M]


def masked_logits(model: NativeModel, ids_BL: Tensor, places_M: Tensor, *, is_shifted: bool) -> Tensor:
    """Logits [M, V] of the rows that predict the masks."""
    rows_M = (places_M - 1).clamp(min=0) if is_shifted else places_M
    logits_MV: Tensor = model.head(model.hidden(ids_BL)[0, rows_M])
    return logits_MV


def proposals_of_masks(
    model: NativeModel, ids_BL: Tensor, places_M: Tensor, *, is_shifted: bool
) -> Proposals:
    """Tokens and confidences of the masks, by chunks of rows, without a second tensor of logits."""
    logits_MV = masked_logits(model, ids_BL, places_M, is_shifted=is_shifted)
    chunk_rows = max(1, CHUNK_BYTES // (4 * logits_MV.shape[1]))
    parts = [
        _fused_confidence(logits_MV[start : start + chunk_rows]) for start in _starts(logits_MV, chunk_rows)
    ]
    tokens, confidences = zip(*parts, strict=True)
    return torch.cat(tokens), torch.cat(confidences)


def _starts(logits_MV: Tensor, chunk_rows: int) -> range:
    return range(0, len(logits_MV), chunk_rows)


def _fused_confidence(logits_MV: Tensor) -> Proposals:
    highest_M, tokens_M = logits_MV.max(-1)
    return tokens_M, (highest_M.float() - logits_MV.float().logsumexp(-1)).exp()


def proposals_to_compile(
    model: NativeModel, ids_BL: Tensor, places_M: Tensor, *, is_shifted: bool
) -> Proposals:
    """`proposals_of_masks` without chunks: a compiler fuses the fp32 copy into the reductions."""
    return _fused_confidence(masked_logits(model, ids_BL, places_M, is_shifted=is_shifted))


class NativeArm:
    """One native arm of a model; `backend` is torch.compile's (tests take one that needs no compiler)."""

    def __init__(self, arm: str, model: NativeModel, *, is_shifted: bool, backend: str = "inductor") -> None:
        assert arm in NATIVE_ARMS, arm
        self.arm, self.model, self.is_compiled = arm, model, arm.startswith("compile")
        self._propose = self._propose_of(arm, is_shifted)
        if self.is_compiled:
            self._propose = torch.compile(self._propose, dynamic=True, backend=backend)

    def _propose_of(self, arm: str, is_shifted: bool) -> Propose:
        model = self.model
        if arm in ("native_fp64", "native", "compile"):
            dtype = torch.float64 if arm == "native_fp64" else None
            return lambda ids, places: proposals_of_all(
                model, ids, places, is_shifted=is_shifted, dtype=dtype
            )
        of_masks = proposals_of_masks if arm == "masked" else proposals_to_compile
        return lambda ids, places: of_masks(model, ids, places, is_shifted=is_shifted)

    @torch.inference_mode()
    def propose(self, canvas: Canvas) -> Proposals:
        """Tokens and confidences of the masks."""
        if self.is_compiled:
            # Both sizes vary from call to call. `maybe`: int32 indices may add a bound, which is no error.
            torch._dynamo.maybe_mark_dynamic(canvas.ids_BL, 1)
            torch._dynamo.maybe_mark_dynamic(canvas.places_M, 0)
        return self._propose(canvas.ids_BL, canvas.places_M)

    @torch.inference_mode()
    def step(self, canvas: Canvas) -> Tensor:
        """Return the ids [1, L] after one step, which decides the mask of the highest confidence."""
        tokens_M, confidence_M = self.propose(canvas)
        best = confidence_M.argmax()
        ids_BL = canvas.ids_BL.clone()
        ids_BL[0, canvas.places_M[best]] = tokens_M[best]
        return ids_BL

    def num_compilations(self) -> int:
        """Graphs that the compiler made in this process so far."""
        return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])
