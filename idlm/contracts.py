"""Plain data that crosses module borders: what a caller asks for, what a pass is fed, what comes back.

Shapes: B sequences of this pass, R rows (tokens fed, packed over sequences), X rows whose logits are wanted,
J tokens a pass can emit for one sequence, W places of a block.

This file imports neither torch nor numpy, for the command lines import it before they load a model.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

from idlm.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

LARGEST_NUMBER = sys.float_info.max
MAX_SAMPLES = 1 << 16
"""Samples of one request: all of them are queued at once."""
MAX_LOGPROBS = 1024
"""Alternatives reported for each token: a pass copies so many for every row to the host."""
NUMBERS = ("temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "logprobs", "n", "tau")
"""The sampling settings that are one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """One request's sampling settings. The defaults draw from the model's own law; temperature 0 is greedy.

    `top_k` 0, `top_p` 1 and `min_p` 0 are off. `tau` relaxes acceptance to min(1, (1+tau) p/q) and makes
    the answer lossy. `seed` None draws a fresh one. `logprobs` k returns the log-probability (model's own
    law, before temperature) of each token with those of the k likeliest. `n` samples come back as n
    completions. `decoder_options`: what this request has otherwise than the engine's decoder, by the names of
    its options (block: threshold, edit_threshold, entropy_bound, steps; ar, isd: none).
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int = 512
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    n: int = 1
    tau: float = 0.0
    decoder_options: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", _as_tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(map(own_number, _as_tuple(self.stop_token_ids))))
        for name in (*NUMBERS, "ignore_eos"):
            object.__setattr__(self, name, own_number(getattr(self, name)))
        if isinstance(self.decoder_options, Mapping):
            options = {name: own_number(value) for name, value in self.decoder_options.items()}
            object.__setattr__(self, "decoder_options", options)
        problems = [text for text, is_bad in self._checks() if is_bad]
        if problems:
            raise UserError("IDLM-0401", "; ".join(problems), fix="correct the sampling settings named")

    @property
    def has_filters(self) -> bool:
        """Whether tokens may be cut off from the tempered law."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    def _checks(self) -> list[tuple[str, bool]]:
        return [
            (
                f"temperature={self.temperature!r} must be a finite number >= 0 (0 is greedy)",
                not (is_number(self.temperature) and self.temperature >= 0),
            ),
            (f"top_p={self.top_p!r} must be in (0, 1]", not (is_number(self.top_p) and 0 < self.top_p <= 1)),
            (
                f"top_k={self.top_k!r} must be an integer in [0, 2**31) (0 is off)",
                not (_is_int(self.top_k, 0) and self.top_k < 2**31),
            ),
            (
                f"min_p={self.min_p!r} must be in [0, 1]",
                not (is_number(self.min_p) and 0 <= self.min_p <= 1),
            ),
            (
                f"seed={self.seed!r} must be an integer in [0, 2**63)",
                self.seed is not None and not (_is_int(self.seed, 0) and self.seed < 2**63),
            ),
            (f"max_tokens={self.max_tokens!r} must be an integer >= 1", not _is_int(self.max_tokens, 1)),
            (f"stop={self.stop!r} must be non-empty strings", not all(_is_text(text) for text in self.stop)),
            (
                f"stop_token_ids={self.stop_token_ids!r} must be integers >= 0",
                not all(_is_int(token, 0) for token in self.stop_token_ids),
            ),
            (
                f"ignore_eos={self.ignore_eos!r} must be true or false",
                not isinstance(self.ignore_eos, bool),
            ),
            (
                f"logprobs={self.logprobs!r} must be an integer in [0, {MAX_LOGPROBS}]",
                self.logprobs is not None
                and not (_is_int(self.logprobs, 0) and self.logprobs <= MAX_LOGPROBS),
            ),
            (
                f"n={self.n!r} must be an integer in [1, {MAX_SAMPLES}]",
                not (_is_int(self.n, 1) and self.n <= MAX_SAMPLES),
            ),
            (
                f"tau={self.tau!r} must be a finite number >= 0 (0 is exact)",
                not (is_number(self.tau) and self.tau >= 0),
            ),
            (
                f"decoder_options={self.decoder_options!r} must be a dict of names",
                not (isinstance(self.decoder_options, dict) and all(map(_is_text, self.decoder_options))),
            ),
        ]

    def with_seed(self, seed: int) -> SamplingParams:
        """The same settings with a definite seed."""
        return replace(self, seed=seed)


def _as_tuple(value: object) -> tuple[Any, ...]:
    """One value, several, or None for none; whatever cannot be iterated is left to the checks."""
    if value is None:
        return ()
    try:
        # Not by the look of it: a tensor without dimensions has __iter__ too.
        return (value,) if isinstance(value, str) else tuple(value)  # type: ignore[arg-type]
    except TypeError:
        return (value,)


def own_number(value: object) -> object:
    """A number of numpy's, or of anybody's, and numpy's true and false, as Python's own; else as it is."""
    if isinstance(value, int | float):
        return value
    # Without numpy nothing can be a number of numpy's; unlike its other numbers, its bool is no `Integral`.
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.bool_):
        return bool(value)
    if isinstance(value, Integral):
        return int(value)
    return float(value) if isinstance(value, Real) else value


def is_number(value: object) -> bool:
    """Whether it is a number that fp64 can hold."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST_NUMBER


def _is_int(value: object, at_least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= at_least


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """Log-probability (nats) of an emitted token under the model's own law, and of the likeliest ones."""

    token_id: int
    logprob: float
    top: dict[int, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One finished answer.

    `token_ids` holds every emitted token, the stop token included; `text` ends before it, and before a
    stop string. `finish_reason`: "stop", "length", "abort" or "error" (then `error` says which, code
    first, and tokens and text are what there was by then). `num_cached_tokens` of the prompt were in the
    prefix cache. `num_forwards` counts every forward pass that fed rows of this request, prompt included.
    `tested_by_position[j]` drafts at position j+1 were tested, `accepted_by_position[j]` of them accepted,
    none behind a stop; `acceptance_rate` is their ratio over all positions, None where nothing was tested.
    `exactness`: "exact" (the answer has the law that its decoder stands for: the AR model's for ar and isd,
    that of the unmasking itself for block) or "lossy".
    """

    request_id: str
    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    num_prompt_tokens: int
    num_forwards: int
    num_cached_tokens: int = 0
    accepted_by_position: tuple[int, ...] = ()
    tested_by_position: tuple[int, ...] = ()
    seed: int | None = None
    exactness: str = "exact"
    logprobs: tuple[TokenLogprob, ...] | None = None
    error: str | None = None

    @property
    def tokens_per_forward(self) -> float:
        """Emitted tokens over forward passes (TPF); 1.0 for AR decoding of an unchunked prompt."""
        return len(self.token_ids) / self.num_forwards if self.num_forwards else 0.0

    @property
    def acceptance_rate(self) -> float | None:
        """Share of the tested drafts that were accepted, or None."""
        tested = sum(self.tested_by_position)
        return sum(self.accepted_by_position) / tested if tested else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ActiveBlocks:
    """Of each sequence the block of `size` slots that is being decided, from slot `starts_B` on: all before
    is final or becomes so in this pass. Rows at or behind that slot are the block's; a pass may feed none,
    some or all of them. `is_maskable_BW` (bool): its masks that this pass may decide, if their wanted rows
    have logits. `num_passes_B` passes have decided something of the block before this one, of the
    `num_steps_B` that its quota allots it; some strategies need fewer. `num_scheduled_B`: tokens of each
    sequence that the host scheduled to be stored (the device may know of one more clean block); None: all
    that are fed. `max_scheduled`: upper bound of their sum; None: the host knows none.
    """

    starts_B: Tensor
    is_maskable_BW: Tensor
    num_passes_B: Tensor
    num_steps_B: Tensor
    size: int
    num_scheduled_B: Tensor | None = None
    max_scheduled: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """What ONE forward pass is fed, over all sequences of a batch, as plain data.

    Sequence b owns rows cu_rows_B1[b] : cu_rows_B1[b+1]. Row r is token `token_ids_R[r]` at rotary
    position `positions_R[r]`, its key and value go to logical KV slot `slots_R[r]` of its sequence, and it
    sees the slots [0, limits_R[r]) and [branch_starts_R[r], slots_R[r]]: two ranges serve causal, block,
    tree and branch alike. `is_mask_R` (bool) marks the MASK rows, which a gated adapter applies to: text may
    hold the mask's id, so it is said here and never read off the ids; None: there can be none. Logits are
    wanted for `logit_rows_X` only: W rows for every sequence, from `first_logit_B[b]` on, of which a sequence
    that feeds fewer repeats its last. `samples_B` (bool): the sequence decodes in this pass; what the others'
    wanted rows say is not looked at. Rows from cu_rows_B1[-1] on are padding, whose KV is not stored.
    `advances_B` (bool): its fed tokens become computed ones; False for a sequence that is as long as it may
    get. All other tensors int64, all on the engine's device; `max_rows` and `max_slots` are upper bounds that
    the host knows. `active`: of block diffusion. `has_logits_X` (bool) comes with the logits: False for a
    wanted row that an accelerator dropped, whose logits mean nothing; None: no row was dropped.
    """

    lanes_B: Tensor
    cu_rows_B1: Tensor
    sequence_R: Tensor
    token_ids_R: Tensor
    positions_R: Tensor
    slots_R: Tensor
    limits_R: Tensor
    branch_starts_R: Tensor
    is_mask_R: Tensor | None
    logit_rows_X: Tensor
    first_logit_B: Tensor
    num_feed_B: Tensor
    samples_B: Tensor
    advances_B: Tensor
    max_rows: int
    max_slots: int
    active: ActiveBlocks | None = None
    has_logits_X: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """What one pass committed. Sequence b emitted `token_ids_BJ[b, :num_emitted_B[b]]`.

    `num_tested_B` drafts were tested in order until the first rejection, `num_accepted_B` of them
    accepted. Token j of sequence b was predicted by wanted row first_logit_B[b] + j. `nonfinite_B` (int64)
    is 1 where the logits that tokens were drawn from are no law (`kernels.sampling.lawless`), so that the
    tokens mean nothing; more where that is true of the next drafts: then nothing can follow the tokens.
    """

    token_ids_BJ: Tensor
    num_emitted_B: Tensor
    num_accepted_B: Tensor
    num_tested_B: Tensor
    nonfinite_B: Tensor
