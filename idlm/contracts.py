"""Plain data that crosses module borders: requests, the input of a forward pass, and results.

Shapes: B sequences of this pass, R rows (tokens fed, packed over sequences), X rows whose logits are wanted,
J tokens that a pass can emit for one sequence, W positions of a block.

This file imports neither torch nor numpy, because the command lines import it before they load a model.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from idlm.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

LARGEST_NUMBER = sys.float_info.max
MAX_SAMPLES = 1 << 16
"""Largest number of samples of one request: all of them are queued at once."""
MAX_LOGPROBS = 1024
"""Largest number of alternatives per token: a pass copies that many for every row to the host."""
NUMBERS = ("temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "logprobs", "n", "tau")
"""The sampling settings that are numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling settings of one request. The defaults draw from the model's own distribution; temperature 0 is
    greedy.

    `top_k` 0, `top_p` 1 and `min_p` 0 are off. `tau` relaxes acceptance to min(1, (1+tau) p/q) and makes the
    answer lossy. `seed` None draws a fresh one. `logprobs` k returns the log-probability of each token (under
    the model's own distribution, before temperature) with those of the k likeliest tokens. `n` samples give n
    completions. `decoder_options` override options of the engine's decoder for this request (block:
    threshold, edit_threshold, entropy_bound, steps; ar, isd: none). A value that is not allowed raises
    UserError IDLM-0401.
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
        problems = [
            f"{name}={getattr(self, name)!r} must be {allowed}"
            for name, is_valid, allowed in self._checks()
            if not is_valid
        ]
        if problems:
            raise UserError("IDLM-0401", "; ".join(problems), fix="correct the sampling settings named")

    @property
    def has_filters(self) -> bool:
        """Whether top-k, top-p or min-p may remove tokens."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    def _checks(self) -> list[tuple[str, bool, str]]:
        """Return (name, whether its value is valid, what is allowed) of each setting."""
        logprobs, options = 0 if self.logprobs is None else self.logprobs, self.decoder_options
        return [
            (
                "temperature",
                _is_in(self.temperature, 0, LARGEST_NUMBER),
                "a finite number >= 0 (0 is greedy)",
            ),
            ("top_p", _is_in(self.top_p, 0, 1) and self.top_p > 0, "in (0, 1]"),
            ("top_k", _is_int(self.top_k, 0, 2**31 - 1), "an integer in [0, 2**31) (0 is off)"),
            ("min_p", _is_in(self.min_p, 0, 1), "in [0, 1]"),
            ("seed", self.seed is None or _is_int(self.seed, 0, 2**63 - 1), "an integer in [0, 2**63)"),
            ("max_tokens", _is_int(self.max_tokens, 1), "an integer >= 1"),
            ("stop", all(map(_is_text, self.stop)), "non-empty strings"),
            ("stop_token_ids", all(_is_int(token, 0) for token in self.stop_token_ids), "integers >= 0"),
            ("ignore_eos", isinstance(self.ignore_eos, bool), "true or false"),
            ("logprobs", _is_int(logprobs, 0, MAX_LOGPROBS), f"an integer in [0, {MAX_LOGPROBS}]"),
            ("n", _is_int(self.n, 1, MAX_SAMPLES), f"an integer in [1, {MAX_SAMPLES}]"),
            ("tau", _is_in(self.tau, 0, LARGEST_NUMBER), "a finite number >= 0 (0 is exact)"),
            ("decoder_options", isinstance(options, dict) and all(map(_is_text, options)), "a dict of names"),
        ]

    def with_seed(self, seed: int) -> SamplingParams:
        """Return the same settings with a definite seed."""
        return replace(self, seed=seed)


def _as_tuple(value: object) -> tuple[Any, ...]:
    """Return one value or several as a tuple, and () for None; the checks refuse what is left."""
    if value is None:
        return ()
    try:
        # A tensor without dimensions has __iter__ too, so only iterating tells.
        return (value,) if isinstance(value, str) else tuple(value)  # type: ignore[arg-type]
    except TypeError:
        return (value,)


def own_number(value: object) -> object:
    """Convert numpy scalars to Python; leave anything else unchanged."""
    numpy = sys.modules.get("numpy")
    return value.item() if numpy is not None and isinstance(value, numpy.generic) else value


def is_number(value: object) -> bool:
    """Return whether `value` is an int or a float that fp64 can hold; not NaN, not infinite."""
    return _is_in(value, -LARGEST_NUMBER, LARGEST_NUMBER)


def _is_in(value: object, least: float, largest: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= largest


def _is_int(value: object, least: int, largest: float = math.inf) -> bool:
    return isinstance(value, int) and _is_in(value, least, largest)


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """Log-probability (nats) of an emitted token and of the likeliest ones, under the model's own
    distribution.
    """

    token_id: int
    logprob: float
    top: dict[int, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One finished answer.

    `token_ids` holds every emitted token, the stop token included; `text` ends before the stop token or stop
    string. `finish_reason`: "stop", "length", "abort" or "error"; with "error", `error` is the message (code
    first), and tokens and text are those from before it. `num_cached_tokens` of the prompt were in the prefix
    cache. `num_forwards` counts every forward pass that fed rows of this request, prompt included.
    `tested_by_position[j]` drafts at position j+1 were tested and `accepted_by_position[j]` of them accepted,
    not counting positions after a stop; `acceptance_rate` is their ratio over all positions, None if no draft
    was tested. `exactness`: "exact" (the answer has the distribution that its decoder promises: the AR
    model's for ar and isd, that of the unmasking itself for block) or "lossy".
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
        """Emitted tokens per forward pass (TPF); 1.0 for AR decoding of an unchunked prompt."""
        return len(self.token_ids) / self.num_forwards if self.num_forwards else 0.0

    @property
    def acceptance_rate(self) -> float | None:
        """Share of the tested drafts that were accepted, or None."""
        tested = sum(self.tested_by_position)
        return sum(self.accepted_by_position) / tested if tested else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ActiveBlocks:
    """The block of `size` slots that each sequence decodes, from slot `starts_B` on.

    All slots before it are final or become final in this pass. Rows at or after that slot belong to the
    block; a pass may feed none, some or all of them. `is_maskable_BW` (bool) marks the masks that this pass
    may decide, provided their wanted rows have logits. `num_passes_B` earlier passes have decided part of the
    block, of the `num_steps_B` that its quota allows; some strategies need fewer.
    """

    starts_B: Tensor
    is_maskable_BW: Tensor
    num_passes_B: Tensor
    num_steps_B: Tensor
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """The input of ONE forward pass over all sequences of a batch, as plain data.

    Sequence b owns rows cu_rows_B1[b] : cu_rows_B1[b+1]. Row r feeds token `token_ids_R[r]` at rotary
    position `positions_R[r]`, stores its key and value in logical KV slot `slots_R[r]` of its sequence, and
    sees the slots [0, limits_R[r]) and [branch_starts_R[r], slots_R[r]]: two ranges serve causal, block, tree
    and branch alike. `is_mask_R` (bool) marks the MASK rows, to which a gated adapter applies; ids cannot
    tell, because text may hold the mask's id. None: there are no MASK rows. Logits are wanted for
    `logit_rows_X` only: W rows per sequence, from `first_logit_B[b]` on; a sequence that feeds fewer repeats
    its last. `samples_B` (bool): the sequence decodes in this pass; the wanted rows of the others are
    ignored. Rows from cu_rows_B1[-1] on are padding, whose KV is not stored. `advances_B` (bool): its fed
    tokens become computed ones; False for a sequence that has reached its largest length. All other tensors
    are int64; all are on the engine's device. `max_rows` and `max_slots` are upper bounds known to the host.
    `active`: for block diffusion only. `has_logits_X` (bool) comes with the logits: False for a wanted row
    that an accelerator dropped, whose logits are meaningless; None: no row was dropped.
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
    """The tokens that one pass committed. Sequence b emitted `token_ids_BJ[b, :num_emitted_B[b]]`.

    `num_tested_B` drafts were tested in order until the first rejection, and `num_accepted_B` of them
    accepted. Token j of sequence b was predicted by wanted row first_logit_B[b] + j. `nonfinite_B` (int64) is
    1 if tokens were drawn from non-finite logits (`kernels.sampling.nonfinite`) and so are meaningless;
    larger if only the logits of the next drafts are non-finite: then nothing can follow the tokens.
    """

    token_ids_BJ: Tensor
    num_emitted_B: Tensor
    num_accepted_B: Tensor
    num_tested_B: Tensor
    nonfinite_B: Tensor
