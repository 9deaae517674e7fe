"""A toy whose joint law can be enumerated, its law by transformers, and the test of draws against it.

The oracle shares no code with the engine: logits come from transformers forwards over every continuation, and
sampling settings from transformers' logits warpers. The mask id is an ordinary token of the law.
Shapes: B draws, T = 8 response tokens, V = 5 tokens, C cells."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from idlm.contracts import SamplingParams
from idlm.infer.engine import Engine
from idlm.semantics import Semantics

VOCAB, MASK_ID, NUM_TOKENS, WINDOW = 5, 4, 8, 4
NEUTRAL = SamplingParams(max_tokens=NUM_TOKENS, seed=0)
PROMPT = (1,)
MAX_PROMPT = 3
NUM_LANES = 1024
PER_REQUEST = 250
DEVICE: dict[str, object] = {"device": "cpu"}
"""Engine settings that select the device."""
TV_AT_1E5 = 0.0188
"""Total variation over 64 cells that 1e5 draws detect; it scales as 1 / sqrt(draws)."""
MIN_EXPECTED = 10.0


def write_law_toy(
    directory: Path,
    *,
    vocab_size: int = VOCAB,
    eos_id: int | None = None,
    mask_id: int = MASK_ID,
    stride: int = NUM_TOKENS,
) -> Path:
    """A one-layer Llama of few tokens with random weights: flat laws, mask rows unlike clean rows."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        initializer_range=0.6,
        bos_token_id=None,
        eos_token_id=eos_id,
        pad_token_id=None,
    )
    torch.manual_seed(4)
    transformers.LlamaForCausalLM(config).float().save_pretrained(directory)
    Semantics(mask_token_id=mask_id, stride=stride).save(directory)
    return directory


def build_engine(directory: Path, decoder: str, *, num_lanes: int = NUM_LANES, **options: object) -> Engine:
    """An engine sized for `MAX_PROMPT` + 8 tokens."""
    settings = {
        "dtype": "float32",
        "max_num_seqs": num_lanes,
        "max_length": MAX_PROMPT + NUM_TOKENS,
        "max_num_batched_tokens": 1 << 20,
        "page_size": 32,
    }
    return Engine.from_pretrained(directory, decoder, **{**settings, **DEVICE, **options})


@functools.cache
def toy_logits(directory: Path, prompt: tuple[int, ...]) -> tuple[Tensor, ...]:
    """Per depth t the logits [V^t, V] (fp64) of token t after every continuation of t tokens."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(directory).float().eval()
    deepest = torch.tensor(list(itertools.product(range(VOCAB), repeat=NUM_TOKENS - 1)))
    rows = torch.cat([torch.tensor(prompt).expand(len(deepest), -1), deepest], dim=1)
    with torch.inference_mode():
        logits = torch.cat([model(part).logits[:, len(prompt) - 1 :] for part in rows.split(8192)])
    return tuple(
        logits[:: VOCAB ** (NUM_TOKENS - 1 - depth), depth].double().clone() for depth in range(NUM_TOKENS)
    )


def warped(logits_XV: Tensor, params: SamplingParams) -> Tensor:
    """Probabilities [X, V] after temperature, top-k and top-p, by transformers."""
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    warpers = [TemperatureLogitsWarper(float(params.temperature))]
    warpers += [TopKLogitsWarper(params.top_k)] if params.top_k else []
    warpers += [TopPLogitsWarper(params.top_p)] if params.top_p < 1 else []
    for warper in warpers:
        logits_XV = warper(None, logits_XV)
    return logits_XV.softmax(-1)


@functools.cache
def exact_law(directory: Path, prompt: tuple[int, ...], params: SamplingParams) -> tuple[Tensor, Tensor]:
    """Joint AR law [V^4] of response tokens 0..3 and of tokens 4..7, by enumeration of all V^8 responses."""
    joint = torch.ones(1, dtype=torch.float64)
    for logits_XV in toy_logits(directory, prompt):
        joint = (joint[:, None] * warped(logits_XV, params)).flatten()
    cells = VOCAB**WINDOW
    joint = joint.view(cells, cells)
    return joint.sum(1), joint.sum(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Fit of draws to a law: chi-square tail probability, total variation over 64 cells and its bound."""

    p_value: float
    total_variation: float
    bound: float

    def holds(self, level: float) -> bool:
        """Whether neither statistic rejects."""
        return self.p_value >= level and self.total_variation <= self.bound


def fit(cells_B: Tensor, law_C: Tensor) -> Fit:
    """Pearson chi-square over cells of at least 10 expected draws (the others pooled), and the TV bound."""
    num_draws = len(cells_B)
    counts_C = cells_B.bincount(minlength=len(law_C)).double()
    order_C = law_C.argsort(descending=True)
    num_own = int((law_C * num_draws >= MIN_EXPECTED).sum())
    observed, expected = _pooled(counts_C[order_C], law_C[order_C] * num_draws, num_own)
    if bool((observed[expected == 0] > 0).any()):
        return Fit(p_value=0.0, total_variation=1.0, bound=0.0)
    observed, expected = observed[expected > 0], expected[expected > 0]
    chi2 = ((observed - expected) ** 2 / expected).sum()
    freedom = torch.tensor((len(expected) - 1) / 2, dtype=torch.float64)
    coarse, coarse_law = _pooled(counts_C[order_C], law_C[order_C] * num_draws, min(63, num_own))
    return Fit(
        p_value=float(torch.special.gammaincc(freedom, chi2 / 2)),
        total_variation=float((coarse - coarse_law).abs().sum() / 2 / num_draws),
        bound=TV_AT_1E5 * (1e5 / num_draws) ** 0.5,
    )


def _pooled(observed_C: Tensor, expected_C: Tensor, num_own: int) -> tuple[Tensor, Tensor]:
    def pool(values_C: Tensor) -> Tensor:
        return torch.cat([values_C[:num_own], values_C[num_own:].sum()[None]])

    return pool(observed_C), pool(expected_C)


def window_cells(draws_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Cell numbers [B] of tokens 0..3 and of tokens 4..7."""
    powers = VOCAB ** torch.arange(WINDOW - 1, -1, -1)
    return (draws_BT[:, :WINDOW] * powers).sum(1), (draws_BT[:, WINDOW:] * powers).sum(1)


Setting = tuple[tuple[int, ...], SamplingParams]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """Draws [B, 8] of each (prompt, params), and the acceptance rate over all of them."""

    draws: Mapping[Setting, Tensor]
    acceptance: float


def sample(
    engine: Engine,
    settings: Sequence[Setting],
    num_draws: int,
    *,
    per_request: int = PER_REQUEST,
    at_once: int = 20 * NUM_LANES,
    first_round: int = 0,
) -> Sampled:
    """`num_draws` responses of each setting through the whole engine, settings interleaved in every batch.
    `at_once`: number of responses requested together, which keep the lanes busy. Seeds follow from the
    number of the round, a request of each setting."""
    requests: list[tuple[int, SamplingParams]] = [
        (which, replace(params, seed=1_000_003 * round_ + which, n=per_request))
        for round_ in range(first_round, first_round + num_draws // per_request)
        for which, (_, params) in enumerate(settings)
    ]
    found: list[list[tuple[int, ...]]] = [[] for _ in settings]
    accepted = tested = 0
    for part in _chunks(requests, max(1, at_once // per_request)):
        completions = iter(engine.generate([list(settings[w][0]) for w, _ in part], [p for _, p in part]))
        for which, params in part:
            for completion in itertools.islice(completions, params.n):
                found[which].append(completion.token_ids)
                accepted += sum(completion.accepted_by_position)
                tested += sum(completion.tested_by_position)
    return Sampled(
        draws={setting: torch.tensor(rows) for setting, rows in zip(settings, found, strict=True)},
        acceptance=accepted / tested if tested else 0.0,
    )


def _chunks(items: list[tuple[int, SamplingParams]], size: int) -> Iterator[list[tuple[int, SamplingParams]]]:
    return (items[start : start + size] for start in range(0, len(items), size))


def fits(directory: Path, sampled: Sampled) -> dict[str, Fit]:
    """Fit of every setting's start and middle, labelled."""
    named = {}
    for (prompt, params), draws_BT in sampled.draws.items():
        label = f"T={params.temperature} k={params.top_k} p={params.top_p}"
        probs = exact_law(directory, prompt, params)
        for window, cells_B, law_C in zip(("start", "middle"), window_cells(draws_BT), probs, strict=True):
            named[f"{label} {window}"] = fit(cells_B, law_C)
    return named


def assert_fits(toy: Path, sampled: Sampled, level: float) -> dict[str, Fit]:
    """Assert that the draws have the law of the checkpoint `toy`; returns how they fit."""
    found = fits(toy, sampled)
    assert not misfits(found, level), found
    return found


def change_modes(engine: Engine) -> None:
    """Let the last commit decide the mode of an adaptive engine."""

    def choose(load: Any) -> int:
        return int(engine.table.num_known_Z.sum()) % len(engine.decoder.modes)

    engine._stride_controller.choose = choose


def misfits(named: Mapping[str, Fit], level: float) -> dict[str, Fit]:
    """The fits that are rejected at significance `level`."""
    return {label: found for label, found in named.items() if not found.holds(level)}


def worst(named: Iterable[Fit]) -> float:
    """Smallest tail probability."""
    return min(found.p_value for found in named)
