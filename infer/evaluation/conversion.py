"""What a conversion changed and what it gains: clean rows against those of the base, acceptance of drafts,
and the time of a pass, in Markdown and a figure.

Shapes: R rows of a text, N query heads, H head dim, I scored rows, Y of a slice, D width, V vocabulary."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from idlm.acceptance import tokens_per_forward_cold
from idlm.contracts import SamplingParams
from idlm.errors import UserError
from idlm.infer.cli.config import EngineArguments, engine_name, require_tokenizer
from idlm.infer.engine import Engine
from idlm.infer.evaluation.arms import sum_columns, with_engine
from idlm.infer.models.base import OtherLayers
from idlm.infer.models.loader import LoadedModel
from idlm.infer.parts import Prompt
from idlm.infer.runtime.logprobs import ROWS_AT_ONCE
from idlm.infer.runtime.model_runner import PagedKV
from idlm.infer.state.page_pool import KVCache
from idlm.text.markdown import table

MAX_KL, MIN_AGREEMENT = 0.03, 0.93
"""Bounds of clean rows that count as those of the base: nats a token, share of equal first choices."""
MAX_ANSWERS, MAX_LENGTH, TIMED_TOKENS = 32, 1_024, 64
"""Answers that count, tokens of each with its prompt, and tokens that are timed."""
CLASSES = ("letters", "digits", "punctuation", "white space", "special")
PAGE = Path(__file__).with_suffix(".md")
SAME = "It is within the bounds: KL at most {kl:g}, agreement at least {agreement:.0%}."
MOVED = """**Warning: clean rows moved too far** (bounds: KL {kl:g}, agreement {agreement:.0%}): answers are
not those of the base any more. Lower `train.learning_rate` (try a third of it), give clean rows more weight
(`clean_weight` of `train.stages`), add their distance from the base to the loss (`train.base_kl=10`), train
on answers of the base itself, or train a gated LoRA (`adapter.rank=64`), which changes no clean row."""
GATED = "The adapter changes MASK rows alone; clean rows run through the base's own weights: KL is "
Answer = tuple[Sequence[int], Sequence[int]]
"""Token ids of a prompt and its answer, and the indices, from 1, of the tokens of the answer."""
CleanRows = tuple[Tensor, Callable[[Tensor], Tensor]]
"""Last hidden states [I, D] of scored rows, on the host, and the head, which makes logits [Y, V] of them."""
Drafting = tuple[float, tuple[float, ...], float]
"""A temperature, how often drafts are accepted by position, and emitted tokens over passes."""


class Shift(NamedTuple):
    """Means over tokens of one class: KL(base, own) and the base's entropy in nats, equal first choices."""

    name: str
    num_tokens: int
    kl: float
    agreement: float
    entropy: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """`shifts`: of all tokens, then by class. `origin`: what the answers are. Milliseconds of a pass: of the
    base decoded by AR, and of `decoder`. `drafts` are empty without a decoder that drafts."""

    base: str
    origin: str
    is_gated: bool
    shifts: tuple[Shift, ...]
    decoder: str
    base_ms: float
    own_ms: float
    drafts: tuple[Drafting, ...]

    def text(self) -> str:
        """The page, without what drafts gain where there are none."""
        whole, ratio, own = self.shifts[0], self.base_ms / self.own_ms, []
        rows = [(n, f"{num:,}", f"{kl:.4f}", f"{a:.1%}", f"{e:.2f}") for n, num, kl, a, e in self.shifts]
        verdict = MOVED if whole.kl > MAX_KL or whole.agreement < MIN_AGREEMENT else SAME
        if self.is_gated:
            verdict = GATED + ("exactly 0, checked." if whole.kl == 0 else "not 0: this is another base.")
        for temperature, acceptance, measured in self.drafts:
            expected = tokens_per_forward_cold(acceptance)
            figures = (*acceptance, expected, measured, expected * ratio)
            own.append((f"{temperature:g}", *(f"{figure:.2f}" for figure in figures)))
        num_drafts = len(self.drafts[0][1]) if self.drafts else 0
        positions = [f"accepted {number + 1}" for number in range(num_drafts)]
        header = ("temperature", *positions, "tokens a pass, eq. 3", "measured", "expected speed-up")
        page = PAGE.read_text(encoding="utf-8")
        return (page if own else page.partition("## What its drafts")[0]).format(
            **{name: getattr(self, name) for name in ("base", "origin", "decoder", "base_ms", "own_ms")},
            num_tokens=whole.num_tokens,
            shifts=table(("tokens", "number", "KL (nats a token)", "agreement", "entropy (nats)"), rows),
            verdict=verdict.format(kl=MAX_KL, agreement=MIN_AGREEMENT),
            drafts=table(header, own),
            ratio=ratio,
        )

    def draw(self, path: Path) -> None:
        """KL by class of tokens, and acceptance by position."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(9, 3.2), layout="constrained")
        left, right = figure.subplots(1, 2)
        left.bar([each.name for each in self.shifts], [each.kl for each in self.shifts])
        left.axhline(MAX_KL, color="grey", linestyle=":")
        left.set(title="Clean rows: distance from the base (dotted: bound)", ylabel="KL (nats a token)")
        left.tick_params("x", rotation=20)
        for temperature, acceptance, _ in self.drafts:
            numbers = [str(number + 1) for number in range(len(acceptance))]
            right.plot(numbers, acceptance, marker="o", label=f"temperature {temperature:g}")
            right.legend()
        right.set(title="Drafts: accepted by position", ylim=(0, 1), visible=bool(self.drafts))
        path.parent.mkdir(exist_ok=True)
        figure.savefig(path)


def measure_conversion(
    base: EngineArguments,
    own: EngineArguments,
    answers: Iterable[Answer],
    *,
    origin: str,
    max_tokens: int | None,
) -> Conversion | None:
    """Compare a converted checkpoint with its base, which `base` decodes by AR; None for one without clean
    rows. The first `answers` count. One model is loaded at a time. UserError IDLM-0484 for another tokenizer,
    a model that several GPUs share, and without an answer."""
    cut = [(ids[:MAX_LENGTH], [at for at in scored if at < MAX_LENGTH]) for ids, scored in answers]
    texts = [text for text in cut if text[1]][:MAX_ANSWERS]
    if not texts or base.settings.get("tensor_parallel", 1) > 1:
        what = f"a base is compared on one GPU, by answers that begin within {MAX_LENGTH} tokens of a prompt"
        raise UserError("IDLM-0484", what, fix="leave the base out of compare=, or tensor_parallel out")
    prompts = [token_ids[: scored[0]] for token_ids, scored in texts]

    def of_base(engine: Engine) -> tuple[CleanRows, float, Any]:
        require_tokenizer(engine.tokenizer, "a comparison with a base")
        return clean_rows(engine.model, texts), pass_ms(engine, prompts[0]), engine.tokenizer

    base_rows, base_ms, tokenizer = with_engine(base, of_base)

    def of_own(engine: Engine) -> Conversion | None:
        if engine.semantics.causality != "causal":
            return None
        if not tokenizer.get_vocab().items() <= engine.tokenizer.get_vocab().items():
            what = f"{base.model} has another tokenizer than {own.model}, so it is not its base"
            raise UserError("IDLM-0484", what, fix="give the checkpoint that model.path named in training")
        temperatures = (0.0, 1.0) if engine.decoder.kv_policy.has_drafts else ()
        return Conversion(
            base=base.model,
            origin=origin,
            is_gated=engine.semantics.gated,
            shifts=shifts(base_rows, clean_rows(engine.model, texts), token_classes(tokenizer, texts)),
            decoder=engine_name(engine),
            base_ms=base_ms,
            own_ms=pass_ms(engine, prompts[0]),
            drafts=tuple(measure_drafts(engine, prompts, each, max_tokens) for each in temperatures),
        )

    return with_engine(own, of_own)


@torch.inference_mode()
def clean_rows(model: LoadedModel, answers: Sequence[Answer]) -> CleanRows:
    """Run the model over each text, without MASK rows, and keep the rows that predict its answer."""
    found, trunk, device, spec = [], model.trunk, model.device, model.spec
    for token_ids, scored in answers:
        positions_R = torch.arange(len(token_ids), device=device)
        cache = KVCache(
            (1, len(token_ids), model.local.num_kv_heads, spec.head_dim), dtype=model.dtype, device=device
        )
        kv = WholeText(
            cache=cache, slot_mapping_R=positions_R, scale=spec.score_scale, others=spec.variant.others
        )
        hidden_RD = trunk(torch.tensor(token_ids, device=device), positions_R, kv)
        found.append(hidden_RD[torch.tensor(scored, device=device) - 1].cpu())
    return torch.cat(found), lambda hidden_YD: trunk.logits(hidden_YD.to(device))


@dataclass(frozen=True, kw_only=True)
class WholeText(PagedKV):
    """Keys and values of one text, which no later pass reads, so that the memory of one layer serves all."""

    plan: Any = None
    others: OtherLayers | None

    def attend(self, number: int, q_RNH: Tensor) -> Tensor:
        q, k, v = (each.transpose(0, 1)[None] for each in (q_RNH, *self.cache.layer(number)))
        seen_RR = self.slot_mapping_R[:, None] >= self.slot_mapping_R
        if self.others is not None and self.others.window is not None and number in self.others.numbers:
            seen_RR = seen_RR.triu(1 - self.others.window)
        out_1NRH = F.scaled_dot_product_attention(q, k, v, seen_RR, scale=self.scale, enable_gqa=True)
        return out_1NRH[0].transpose(0, 1)


def shifts(base: CleanRows, own: CleanRows, classes: Sequence[str]) -> tuple[Shift, ...]:
    """KL, agreement and entropy of all rows, and of those of each class; computed in fp32."""
    figures_3I: list[Tensor] = []
    for base_YD, own_YD in zip(*(rows_ID.split(ROWS_AT_ONCE) for rows_ID, _ in (base, own)), strict=True):
        p_YV, q_YV = (logits.float().log_softmax(dim=-1) for logits in (base[1](base_YD), own[1](own_YD)))
        # Conversion may add a row for the mask.
        kl_Y = (p_YV.exp() * (p_YV - q_YV[:, : p_YV.shape[1]])).sum(dim=-1).clamp(min=0)
        same_Y = p_YV.argmax(dim=-1) == q_YV.argmax(dim=-1)
        figures_3I.append(torch.stack((kl_Y, same_Y, -(p_YV.exp() * p_YV).sum(dim=-1))).double().cpu())
    found = []
    for name in ("all", *(name for name in CLASSES if name in classes)):
        chosen_I = torch.tensor([name in ("all", each) for each in classes])
        means = torch.cat(figures_3I, dim=1)[:, chosen_I].mean(dim=1)
        found.append(Shift(name, int(chosen_I.sum()), *means.tolist()))
    return tuple(found)


def token_classes(tokenizer: Any, answers: Sequence[Answer]) -> list[str]:
    """The class of each scored token: letters where it has one, else digits, and so on."""
    special = set(tokenizer.all_special_ids)

    def class_of(token_id: int) -> str:
        text = tokenizer.decode([token_id])
        tests = (any(map(str.isalpha, text)), any(map(str.isdigit, text)), bool(text.strip()), True)
        return "special" if token_id in special else CLASSES[tests.index(True)]

    return [class_of(int(token_ids[at])) for token_ids, scored in answers for at in scored]


def measure_drafts(
    engine: Engine, prompts: Sequence[Prompt], temperature: float, max_tokens: int | None
) -> Drafting:
    params = SamplingParams(temperature=temperature, max_tokens=max_tokens)
    done = engine.generate(prompts, [params.with_seed(seed) for seed in range(len(prompts))])
    # Positions that no draft reached accept none.
    none = (0,) * (max(mode.stride for mode in engine.decoder.modes) - 1)
    accepted = sum_columns([none, *(each.accepted_by_position for each in done)])
    tested = sum_columns([none, *(each.tested_by_position for each in done)])
    num_tokens, num_forwards = sum(len(one.token_ids) for one in done), sum(one.num_forwards for one in done)
    rates = tuple(a / max(1, t) for a, t in zip(accepted, tested, strict=True))
    return temperature, rates, num_tokens / num_forwards


def pass_ms(engine: Engine, prompt: Prompt) -> float:
    """The median time of a pass that decodes one answer, in milliseconds."""
    params = SamplingParams(temperature=0, max_tokens=TIMED_TOKENS, ignore_eos=True)
    times = [time.perf_counter(), *(time.perf_counter() for _ in engine.stream(prompt, params))]
    return 1e3 * statistics.median(end - start for start, end in itertools.pairwise(times))
