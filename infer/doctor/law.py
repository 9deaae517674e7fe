"""The self-test: AR and ISD of this machine's engine against the exact law of a tiny random model.

The law comes from transformers' forward passes over every continuation, so it shares no kernel with the
engine. T tokens, V tokens of the vocabulary, B answers, C = V^T cells: the answers that there are."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

VOCAB, NUM_TOKENS, PROMPT = 5, 4, (1, 3)
NUM_LANES, PER_REQUEST, NUM_REQUESTS, GREEDY_TOKENS = 512, 256, 40, 24
WIDTHS = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.3}
NO_ENDS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
LEVEL = 1e-5
"""A correct engine has a lower p-value on one machine of 100,000."""
MIN_EXPECTED = 10.0
"""Draws of a cell; rarer answers count as one cell."""


def problems(device: torch.device, **settings: Any) -> Iterator[str]:
    """Everything in which decoders differ from the law; none where all is right. `settings` of the engine."""
    with tempfile.TemporaryDirectory(prefix="idlm-doctor-") as folder:
        law_C = _write_model(Path(folder))
        (ar, ar_B), (isd, isd_B) = (_answers(folder, one, device, settings) for one in ("ar", "isd"))
    differing = [number for number, tokens in enumerate(ar) if tokens != isd[number]]
    if differing:
        yield f"greedy tokens of isd are not those of ar, for {len(differing)} of {len(ar)} prompts"
    for name, cells_B in (("ar", ar_B), ("isd", isd_B)):
        p_value = tail_probability(cells_B, law_C)
        if p_value < LEVEL:
            yield f"{len(cells_B):,} samples of {name} do not have the model's law (p={p_value:.1g})"


def _answers(
    folder: str, decoder: str, device: torch.device, settings: dict[str, Any]
) -> tuple[list[tuple[int, ...]], Tensor]:
    """Greedy tokens of some prompts, and the cells [B] of what is drawn after `PROMPT`."""
    from idlm.contracts import SamplingParams
    from idlm.infer.engine import Engine

    sizes = {"max_num_seqs": NUM_LANES, "max_length": 64}
    given: dict[str, Any] = {"dtype": "float32", "device": str(device), **sizes, **settings}
    engine = Engine.from_pretrained(folder, decoder, **given)
    prompts = [[first, second] for first in range(VOCAB) for second in range(VOCAB)]
    greedy = engine.generate(prompts, SamplingParams(temperature=0, max_tokens=GREEDY_TOKENS))
    some = [SamplingParams(max_tokens=NUM_TOKENS, seed=seed, n=PER_REQUEST) for seed in range(NUM_REQUESTS)]
    drawn = engine.generate([list(PROMPT)] * NUM_REQUESTS, some)
    tokens_BT = torch.tensor([answer.token_ids for answer in drawn])
    cells_B = (tokens_BT * VOCAB ** torch.arange(NUM_TOKENS - 1, -1, -1)).sum(1)
    return [tuple(answer.token_ids) for answer in greedy], cells_B


def _write_model(folder: Path) -> Tensor:
    """Save a random model, whose token V - 1 is the mask too; returns its law [C] of answers to `PROMPT`."""
    import transformers
    from safetensors.torch import save_file

    from idlm.semantics import Semantics

    config = transformers.Qwen3Config(vocab_size=VOCAB, **WIDTHS, **HEADS, **NO_ENDS)
    config.architectures = ["Qwen3ForCausalLM"]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.Qwen3ForCausalLM(config).float().eval()
    config.save_pretrained(folder)
    save_file(model.state_dict(), folder / "model.safetensors", metadata={"format": "pt"})
    Semantics(mask_token_id=VOCAB - 1, stride=NUM_TOKENS).save(folder)
    answers_CT = torch.tensor(list(itertools.product(range(VOCAB), repeat=NUM_TOKENS)))
    prompts = torch.tensor(PROMPT).expand(len(answers_CT), -1)
    with torch.inference_mode():
        logits = model(torch.cat([prompts, answers_CT], dim=1)).logits[:, len(PROMPT) - 1 : -1]
    return logits.double().log_softmax(-1).gather(2, answers_CT[..., None]).sum((1, 2)).exp()


def tail_probability(cells_B: Tensor, law_C: Tensor) -> float:
    """Pearson's chi-square test of draws against a law; small if they are not of it."""
    expected_C, observed_C = law_C * len(cells_B), cells_B.bincount(minlength=len(law_C)).double()
    is_own_C = expected_C >= MIN_EXPECTED
    expected, observed = (
        torch.cat([counts_C[is_own_C], counts_C[~is_own_C].sum()[None]])
        for counts_C in (expected_C, observed_C)
    )
    chi_square = ((observed - expected) ** 2 / expected).sum()
    freedom = torch.tensor((len(expected) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, chi_square / 2))
