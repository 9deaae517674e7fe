"""What a caller of the engine gives and gets: sampling settings, completions, log-probabilities.

This file imports neither torch nor numpy: the command lines import it before they load a model."""

from __future__ import annotations

import json
import re
import reprlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, get_args

from idlm.config.schema import LARGEST_NUMBER, is_integer, is_number, option
from idlm.errors import UserError

Exactness = Literal["exact", "lossy"]
MAX_SAMPLES = 1 << 16
"""Largest `n`: all samples of a request are queued at once."""
MAX_LOGPROBS = 1024
"""Largest `logprobs`: each step copies this many alternatives per row to the host."""


DECIMAL = re.compile("[0-9]{1,18}")
MAX_BIASES, MAX_BIAS = 1024, 100
"""Most entries of `logit_bias`, and its largest value."""
CHANGES: dict[str, Any] = {
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "logit_bias": {},
    "no_repeat_ngram_size": 0,
    "min_tokens": 0,
}
"""Settings that change logits by the tokens before them, and the values that change nothing."""
ConstraintKind = Literal["json_schema", "json_object", "regex", "choice", "grammar"]
MAX_CONSTRAINT = 1 << 15
"""Characters of a constraint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraint:
    """What an answer must match as a whole. A token that no match has there is never drawn: its logit counts
    as -inf before temperature and filters.

    `text`: a JSON schema, nothing (`json_object`), a regular expression (that of Rust's crate), the JSON list
    of the possible answers (`choice`), or a grammar in Lark's or llama.cpp's notation. A schema as a dict and
    choices as a list are converted. Raises UserError IDLM-0474."""

    kind: ConstraintKind
    text: str = ""

    def __post_init__(self) -> None:
        if isinstance(self.text, dict | list | tuple):
            object.__setattr__(self, "text", json.dumps(self.text, ensure_ascii=False))
        problem = self._problem()
        if problem:
            fix = 'write {"kind": "regex", "text": "[0-9]+"}; kinds: ' + ", ".join(get_args(ConstraintKind))
            raise UserError("IDLM-0474", f"constraint: {problem}", fix=fix)

    def _problem(self) -> str:
        """What is wrong; problems that the grammar engine detects are not known here."""
        if self.kind not in get_args(ConstraintKind):
            return f"kind={self.kind!r} is unknown"
        if not isinstance(self.text, str) or len(self.text) > MAX_CONSTRAINT:
            return f"text must be text of at most {MAX_CONSTRAINT} characters"
        if any("\ud800" <= char <= "\udfff" for char in self.text):
            return "text has half a surrogate pair, which is not a character"
        if (self.kind == "json_object") != (not self.text):
            return f"kind={self.kind} takes {'no' if self.text else 'a'} text"
        if self.kind not in ("json_schema", "choice"):
            return ""
        try:
            value = json.loads(self.text)
        except (ValueError, RecursionError) as error:
            return f"the text of kind={self.kind} is not JSON: {error}"
        if self.kind == "json_schema":
            return "" if isinstance(value, dict) else "a JSON schema is an object"
        is_list = isinstance(value, list) and value and all(map(_is_text, value))
        return "" if is_list else "choices are a list of texts that are not empty"


def as_constraint(given: Any) -> Constraint | None:
    """A constraint, or the mapping of its fields; None for None. Raises UserError IDLM-0474."""
    if given is None or isinstance(given, Constraint):
        return given
    is_mapping = isinstance(given, Mapping) and "kind" in given and given.keys() <= {"kind", "text"}
    return Constraint(**given) if is_mapping else Constraint(kind=given)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling settings of one request; the defaults sample from the model's own distribution. Raises
    UserError IDLM-0401 that names every value out of range."""

    temperature: float = option("0 is greedy, 1 samples the model's own distribution", 1.0)
    top_p: float = option(
        "keep the most likely tokens up to this total probability; 1 is off, 0 keeps one", 1.0
    )
    top_k: int = option("keep the k most likely tokens; 0 is off", 0)
    min_p: float = option("drop tokens below this fraction of the highest probability; 0 is off", 0.0)
    seed: int | None = option("random stream of each prompt; null draws a fresh one", None)
    max_tokens: int | None = option(
        "longest answer; null: 512, and 128 with decoder=full, whose answers have so many positions; 0 only "
        "with prompt_logprobs",
        None,
    )
    stop: tuple[str, ...] = option("strings that end the answer", ())
    stop_in_reasoning: bool | None = option(
        "stop strings act in the <think> block that begins an answer too; null: if the chat template has no "
        "such tags",
        None,
    )
    stop_token_ids: tuple[int, ...] = option("token ids that end the answer", ())
    ignore_eos: bool = option("continue past the end-of-sequence token", False)
    logprobs: int | None = option(
        "also return the model's own log-probabilities, with this many alternatives per token", None
    )
    prompt_logprobs: int | None = option(
        "also return those of the prompt's tokens, with this many alternatives per token", None
    )
    n: int = option("answers per prompt", 1)
    tau: float = option(
        "relaxed acceptance min(1, (1+tau) p/q) of drafts (decoder=isd, lossy); 0 is exact", 0.0
    )
    adapter: str | None = option(
        "which of adapters= drafts (decoder=isd); null is model= itself. All give the base's answers", None
    )
    decoder_options: dict[str, Any] = field(
        default_factory=dict,
        hash=False,
        metadata={"help": "options of the decoder that a request may set (block: threshold, ...)"},
    )
    presence_penalty: float = option("subtracted from logits of tokens that the answer has; 0 is off", 0.0)
    frequency_penalty: float = option("the same, times how often the answer has the token; 0 is off", 0.0)
    repetition_penalty: float = option(
        "divides positive logits of tokens of prompt and answer, multiplies negative ones; 1 is off", 1.0
    )
    logit_bias: dict[int, float] = field(
        default_factory=dict,
        hash=False,
        metadata={"help": "added to logits, by token id: {50: -100, 17: 2.5}"},
    )
    no_repeat_ngram_size: int = option(
        "no run of so many tokens of prompt and answer comes twice (ar, isd); 0 is off", 0
    )
    min_tokens: int = option("until the answer has so many tokens, no token id ends it", 0)
    constraint: Constraint | None = option(
        "what the answer must match (ar, isd): {kind: regex, text: '[0-9]+'}; kinds: json_schema, "
        "json_object, regex, choice, grammar",
        None,
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", _as_tuple(self.stop))
        for name in self.__dataclass_fields__:
            object.__setattr__(self, name, plain_value(getattr(self, name)))
        object.__setattr__(self, "stop_token_ids", _as_tuple(self.stop_token_ids))
        object.__setattr__(self, "constraint", as_constraint(self.constraint))
        if isinstance(self.decoder_options, dict):
            options = {name: plain_value(value) for name, value in self.decoder_options.items()}
            object.__setattr__(self, "decoder_options", options)
        object.__setattr__(self, "logit_bias", _by_token(self.logit_bias))
        problems = [
            f"{name}={reprlib.repr(getattr(self, name))} must be {allowed}"
            for name, is_allowed, allowed in self._checks()
            if not is_allowed
        ]
        if problems:
            raise UserError("IDLM-0401", "; ".join(problems), fix="correct the sampling settings named")

    @property
    def has_filters(self) -> bool:
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    @property
    def is_single(self) -> bool:
        """Whether the request takes one token per pass, whatever the stride of its decoder."""
        return self.decoder_options.get("stride") == 1

    @property
    def changes(self) -> bool:
        """Whether one of `CHANGES` changes logits."""
        is_penalised = self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1
        return bool(is_penalised or self.logit_bias or self.no_repeat_ngram_size or self.min_tokens)

    def _checks(self) -> tuple[tuple[str, bool, str], ...]:
        """Each field, whether its value is allowed, and what is allowed."""
        has_seed, options, scores = self.seed is not None, self.decoder_options, self.prompt_logprobs
        shortest = 1 if scores is None else 0
        return (
            ("temperature", is_number(self.temperature, 0), "a finite number >= 0 (0 is greedy)"),
            ("top_p", is_number(self.top_p, 0, 1), "in [0, 1] (1 is off)"),
            ("top_k", is_integer(self.top_k, 0, 2**31 - 1), "an integer in [0, 2**31) (0 is off)"),
            ("min_p", is_number(self.min_p, 0, 1), "in [0, 1]"),
            ("seed", not has_seed or is_integer(self.seed, 0, 2**63 - 1), "an integer in [0, 2**63)"),
            (
                "max_tokens",
                self.max_tokens is None or is_integer(self.max_tokens, shortest),
                f"an integer >= {shortest}",
            ),
            ("stop", all(map(_is_text, self.stop)), "non-empty strings"),
            ("stop_token_ids", all(is_integer(token, 0) for token in self.stop_token_ids), "integers >= 0"),
            ("stop_in_reasoning", isinstance(self.stop_in_reasoning, bool | None), "true, false or null"),
            ("ignore_eos", isinstance(self.ignore_eos, bool), "true or false"),
            ("logprobs", _is_count(self.logprobs), f"an integer in [0, {MAX_LOGPROBS}]"),
            ("prompt_logprobs", _is_count(scores), f"an integer in [0, {MAX_LOGPROBS}]"),
            ("n", is_integer(self.n, 1, MAX_SAMPLES), f"an integer in [1, {MAX_SAMPLES}]"),
            ("tau", is_number(self.tau, 0), "a finite number >= 0 (0 is exact)"),
            ("adapter", self.adapter is None or _is_text(self.adapter), "a name or null"),
            *self._change_checks(),
            ("decoder_options", isinstance(options, dict) and all(map(_is_text, options)), "a dict by name"),
        )

    def _change_checks(self) -> tuple[tuple[str, bool, str], ...]:
        """The same of what changes logits."""
        biases = self.logit_bias
        longest = self.max_tokens if isinstance(self.max_tokens, int) else LARGEST_NUMBER
        is_bias = isinstance(biases, dict) and all(
            is_integer(token, 0) and is_number(bias, -MAX_BIAS, MAX_BIAS) for token, bias in biases.items()
        )
        is_least = is_integer(self.min_tokens, 0, longest)
        bias_rule = f"numbers in [-{MAX_BIAS}, {MAX_BIAS}] by token id, at most {MAX_BIASES} of them"
        ngram_rule = "an integer >= 0 (0 is off)"
        if self.constraint is not None:
            ngram_rule = "0 with a constraint, which may need a text twice"
        has_ngrams = is_integer(self.no_repeat_ngram_size, 0, 0 if self.constraint else 2**31 - 1)
        has_factor = is_number(self.repetition_penalty, 1e-3, 1e3)
        return (
            ("presence_penalty", is_number(self.presence_penalty, -2, 2), "in [-2, 2] (0 is off)"),
            ("frequency_penalty", is_number(self.frequency_penalty, -2, 2), "in [-2, 2] (0 is off)"),
            ("repetition_penalty", has_factor, "in [0.001, 1000] (1 is off)"),
            ("logit_bias", is_bias and len(biases) <= MAX_BIASES, bias_rule),
            ("no_repeat_ngram_size", has_ngrams, ngram_rule),
            ("min_tokens", is_least, f"an integer >= 0, at most max_tokens={self.max_tokens!r}"),
        )

    def with_seed(self, seed: int) -> SamplingParams:
        return replace(self, seed=seed)


def _as_tuple(value: Any) -> tuple[Any, ...]:
    """The items of a list, tuple or set, () for None, and one value as a tuple of itself."""
    if isinstance(value, list | tuple | set | frozenset):
        return tuple(map(plain_value, value))
    return () if value is None else (value,)


def _by_token(biases: Any) -> Any:
    """Biases by token id, which JSON writes as text. UserError IDLM-0401 for a token under two keys."""
    if not isinstance(biases, Mapping):
        return biases
    keys = [plain_value(key) for key in biases]
    ids = [int(key) if isinstance(key, str) and DECIMAL.fullmatch(key) else key for key in keys]
    merged = dict(zip(ids, map(plain_value, biases.values()), strict=True))
    if len(merged) < len(ids):
        [(token, num)] = Counter(ids).most_common(1)
        what = f"logit_bias has {num} values for token {token}"
        raise UserError("IDLM-0401", what, fix="give each token id once, without leading zeros")
    return merged


def plain_value(value: Any) -> Any:
    """Convert scalars and arrays of numpy and torch to Python; leave anything else unchanged."""
    return value.tolist() if hasattr(value, "tolist") and hasattr(value, "dtype") else value


def _is_count(num_top: object) -> bool:
    return num_top is None or is_integer(num_top, 0, MAX_LOGPROBS)


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """Log-probability (nats) of a token under the model's own distribution, before temperature. `top`: those
    of the most likely tokens, as many as were requested, the likeliest first."""

    token_id: int
    logprob: float
    top: dict[int, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One finished answer.

    `token_ids` holds every emitted token, the stop token included; `text` ends before it and before a stop
    string. `finish_reason` is "stop", "length", "abort" or "error" (`error` then starts with the code, and
    tokens and text are those emitted so far). The prefix cache held `num_cached_tokens` of the prompt.
    `num_forwards` counts the forward passes that fed rows of this request, prompt included.
    `tested_by_position[j]` drafts at position j+1 were tested and `accepted_by_position[j]` accepted; drafts
    after a stop do not count. `exactness` is "exact" if the answer follows the distribution that its decoder
    stands for (ar, isd: the AR model's; block: that of the unmasking procedure), else "lossy".
    `prompt_logprobs`, if they were requested and of the first sample (`index` 0) only, has an entry for each
    token of the prompt; the first one, which nothing precedes, is None."""

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
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    error: str | None = None

    @property
    def tokens_per_forward(self) -> float:
        """Emitted tokens per forward pass (TPF); 1.0 for AR decoding of an unchunked prompt."""
        return len(self.token_ids) / self.num_forwards if self.num_forwards else 0.0

    @property
    def acceptance_rate(self) -> float | None:
        """Share of the tested drafts that were accepted; None if none was tested."""
        tested = sum(self.tested_by_position)
        return sum(self.accepted_by_position) / tested if tested else None


RECORD_KEYS = (
    *("prompt", "decoder", "accelerators", "run_config", "tokens_per_forward", "acceptance_rate"),
    *(item.name for item in fields(Completion)),
)
"""Keys of an output record of `idlm-generate`, which describe how an answer came about."""
