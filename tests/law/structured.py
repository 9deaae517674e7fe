"""The law of answers that match a grammar: a toy whose answers can be enumerated, and draws of an engine.

The oracle shares no code with the engine or llguidance: it lists the texts that match, allows a token if one
of them goes on so, and takes logits and warpers from transformers, the mask before the warpers."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from idlm.contracts import Constraint, SamplingParams
from idlm.infer.engine import Engine
from tests.law import harness
from tests.law.harness import Fit, fit, warped, write_law_toy

PIECES = ("[", "]", ",", "0", "1", "2", "0,", ",1", "<eos>", "<mask>")
EOS_ID, MASK_ID = 8, 9
NUM_TOKENS = 6
PROMPT = (1, 4)
ITEMS = [item for num in (1, 2, 3) for item in itertools.product("012", repeat=num)]
SCHEMA = {
    "type": "array",
    "items": {"type": "integer", "minimum": 0, "maximum": 2},
    "minItems": 1,
    "maxItems": 3,
}
LANGUAGES: Mapping[Constraint, frozenset[str]] = {
    Constraint(kind="json_schema", text=json.dumps(SCHEMA)): frozenset(
        f"[{','.join(item)}]" for item in ITEMS
    ),
    Constraint(kind="regex", text="[012](,[012]){0,2}"): frozenset(map(",".join, ITEMS)),
}
"""The texts of tokens that match. After an item of the second one, an answer may end or go on."""
SCHEMA_TOY, REGEX_TOY = LANGUAGES
WARPINGS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.6, "top_k": 3},
    {"temperature": 1.5, "top_p": 0.8},
)
SETTINGS = tuple(
    SamplingParams(max_tokens=NUM_TOKENS, constraint=constraint, **warping)
    for constraint in LANGUAGES
    for warping in WARPINGS
)


def write_structured_toy(directory: Path) -> Path:
    """A one-layer Llama of random weights with a tokenizer whose tokens overlap."""
    from tokenizers import Tokenizer, decoders, models

    write_law_toy(directory, vocab_size=len(PIECES), eos_id=EOS_ID, mask_id=MASK_ID, stride=NUM_TOKENS)
    vocab = {piece: number for number, piece in enumerate(PIECES)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token=PIECES[MASK_ID]))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([PIECES[EOS_ID], PIECES[MASK_ID]])
    tokenizer.save(str(directory / "tokenizer.json"))
    names = {"eos_token": PIECES[EOS_ID], "unk_token": PIECES[MASK_ID]}
    (directory / "tokenizer_config.json").write_text(json.dumps(names))
    return directory


def build_engine(directory: Path, decoder: str, *, num_lanes: int = 512, **options: object) -> Engine:
    """An engine sized for the toy's answers."""
    settings = {"num_lanes": num_lanes, "max_length": len(PROMPT) + NUM_TOKENS, **options}
    return harness.build_engine(directory, decoder, **settings)


def exact_law(directory: Path, params: SamplingParams) -> dict[tuple[int, ...], float]:
    """The masked AR law: the probability of every answer, a tuple of token ids, by enumeration."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(directory).float().eval()
    assert params.constraint is not None
    texts = LANGUAGES[params.constraint]
    law: dict[tuple[int, ...], float] = {}
    open_: dict[tuple[int, ...], float] = {(): 1.0}
    while open_:
        prefixes = list(open_)
        with torch.inference_mode():
            logits_BV = (
                model(torch.tensor([[*PROMPT, *prefix] for prefix in prefixes])).logits[:, -1].double()
            )
        allowed_BV = torch.tensor([_allowed(prefix, texts) for prefix in prefixes])
        probs_BV = warped(logits_BV.masked_fill(~allowed_BV, -torch.inf), params)
        following: dict[tuple[int, ...], float] = {}
        for prefix, probs_V in zip(prefixes, probs_BV.tolist(), strict=True):
            for token, probability in enumerate(probs_V):
                if probability > 0:
                    answer = (*prefix, token)
                    into = law if _is_done(answer, texts) else following
                    into[answer] = open_[prefix] * probability
        open_ = following
    return law


def _text(answer: Sequence[int]) -> str:
    return "".join(PIECES[token] for token in answer)


def _allowed(prefix: Sequence[int], texts: frozenset[str]) -> list[bool]:
    text = _text(prefix)
    allowed = [any(one.startswith(text + piece) for one in texts) for piece in PIECES]
    allowed[EOS_ID] = text in texts
    return allowed


def _is_done(answer: Sequence[int], texts: frozenset[str]) -> bool:
    """Whether an answer ends here: by a stop token, by its length, or because no longer text matches."""
    return answer[-1] == EOS_ID or len(answer) == NUM_TOKENS or not any(_allowed(answer, texts)[:EOS_ID])


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredFits:
    """The fit of every setting, and the acceptance rate over all draws."""

    fits: tuple[Fit, ...]
    acceptance: float

    @property
    def p_value(self) -> float:
        """The smallest tail probability."""
        return min(one.p_value for one in self.fits)


def draw_fits(
    directory: Path, engine: Engine, num_draws: int, *, settings: Sequence[SamplingParams] = SETTINGS
) -> StructuredFits:
    """Fit `num_draws` answers of each setting, interleaved in every batch beside requests without a
    constraint, to the masked AR law."""
    counts: list[Counter[tuple[int, ...]]] = [Counter() for _ in settings]
    accepted = tested = 0
    for requests in _rounds(settings, num_draws):
        prompts = [list(PROMPT)] * (1 + len(requests))
        free = SamplingParams(max_tokens=NUM_TOKENS, seed=requests[0].seed)
        completions = iter(engine.generate(prompts, [*requests, free]))
        for count, params in zip(counts, requests, strict=True):
            for completion in itertools.islice(completions, params.n):
                count[completion.token_ids] += 1
                accepted += sum(completion.accepted_by_position)
                tested += sum(completion.tested_by_position)
    found = []
    for count, params in zip(counts, settings, strict=True):
        law = exact_law(directory, params)
        answers = {answer: cell for cell, answer in enumerate(law)}
        # An answer outside of the law gets a cell of probability 0.
        cells = [answers.get(answer, len(law)) for answer in count.elements()]
        probs = torch.tensor([*law.values(), 0.0], dtype=torch.float64)
        found.append(fit(torch.tensor(cells), probs))
    return StructuredFits(fits=tuple(found), acceptance=accepted / tested if tested else 0.0)


def _rounds(settings: Sequence[SamplingParams], num_draws: int) -> Iterator[list[SamplingParams]]:
    per_round = min(num_draws, 1000)
    for number in range(num_draws // per_round):
        yield [
            replace(one, n=per_round, seed=1_000_003 * number + which) for which, one in enumerate(settings)
        ]
