"""Causal families against transformers on random tiny checkpoints of odd sizes, whole and token by token;
their decoders, ranks and adapters.

R rows fed this pass, V vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from idlm.errors import UserError
from idlm.infer.decoders.base import KVWritePolicy
from idlm.infer.distributed.launcher import TensorParallelGroup
from idlm.infer.models.loader import read_outline
from idlm.infer.mosaic.canvas_runner import resolve_canvases
from idlm.infer.settings import EngineSettings
from idlm.semantics import Semantics
from tests.adapters import write_adapter
from tests.contracts.engines import answers, build_engine, clear_answers, greedy, prompts_of
from tests.law import harness
from tests.numerics.test_model_parity import CASES, VOCAB, PagedSession, reference_logits, save_reference
from tests.ranks import group_engine, group_of_threads
from tests.toy import load_model

TOLERANCE = 1e-4
MASK_ID, STRIDE = VOCAB - 1, 4
ODD = {
    "hidden_size": 36,
    "intermediate_size": 52,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "eos_token_id": None,
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "olmo2": ("Olmo2", ODD),
    "olmo2-biased": ("Olmo2", {**ODD, "attention_bias": True, "tie_word_embeddings": True}),
}


VARIANTS |= {
    "smollm3": ("SmolLM3", {**ODD, "no_rope_layers": [1, 0, 1, 1], "attention_bias": True}),
    "smollm3-interval": ("SmolLM3", {**ODD, "no_rope_layer_interval": 2, "mlp_bias": True}),
}
FACTORS = {"embedding_multiplier": 3.3, "residual_multiplier": 0.7, "attention_multiplier": 0.21}
VARIANTS |= {
    "granite": ("Granite", {**ODD, **FACTORS, "logits_scaling": 1.9, "tie_word_embeddings": True}),
    "granite-biased": ("Granite", {**ODD, "attention_bias": True, "mlp_bias": True}),
}
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.1, 1.9],
    "long_factor": [3.0, 9.0],
    "partial_rotary_factor": 0.75,
}
PHI = {**ODD, "bos_token_id": None, "pad_token_id": None}
VARIANTS |= {
    "phi3": ("Phi3", {**PHI, "original_max_position_embeddings": 200, "rope_parameters": LONG_ROPE}),
    "phi3-plain": ("Phi3", {**PHI, "tie_word_embeddings": True, "num_key_value_heads": 6}),
    "glm4": ("Glm4", {**PHI, "head_dim": 12, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5}),
    "glm": ("Glm", {**PHI, "head_dim": 8, "attention_bias": False}),
}
KINDS = ["sliding_attention", "full_attention", "sliding_attention"]
GEMMA = {**PHI, "head_dim": 10, "query_pre_attn_scalar": 17, "num_key_value_heads": 2}
SCALED = {"rope_type": "linear", "factor": 8.0, "rope_theta": 300.0}
VARIANTS |= {
    "gemma3": ("Gemma3Text", {**GEMMA, "sliding_window": 7, "layer_types": KINDS}),
    "gemma3-scaled": (
        "Gemma3Text",
        {
            **GEMMA,
            "sliding_window": 3,
            "rope_parameters": {
                "full_attention": SCALED,
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
            "sliding_window_pattern": 2,
            "attention_bias": True,
        },
    ),
    "phi3-window": ("Phi3", {**PHI, "sliding_window": 11}),
}
ENUMERABLE = {"vocab_size": harness.VOCAB, "num_hidden_layers": 2}
"""What makes a variant one whose law can be enumerated."""


@pytest.fixture(autouse=True, scope="module")
def variants() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, (family, fields) in VARIANTS.items():
            patch.setitem(CASES, name, (family, fields))
            kinds = {"layer_types": KINDS[:2]} if "layer_types" in fields else {}
            patch.setitem(CASES, f"{name}-law", (family, fields | ENUMERABLE | kinds))
        yield


@pytest.fixture(scope="module")
def written(variants: None, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A checkpoint of each variant that says it was converted."""
    made: dict[str, Path] = {}

    def checkpoint(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            save_reference(name, made[name])
            is_small = name.endswith("-law")
            mask, stride = (harness.MASK_ID, harness.NUM_TOKENS) if is_small else (MASK_ID, STRIDE)
            Semantics(mask_token_id=mask, stride=stride).save(made[name])
        return made[name]

    return checkpoint


@pytest.fixture(scope="module")
def pair() -> Iterator[TensorParallelGroup]:
    with group_of_threads(2) as group:
        yield group


def draw(num: int, seed: int = 3) -> list[int]:
    return torch.randint(0, 90, (num,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("name", VARIANTS)
def test_prompts_and_single_steps_equal_transformers(name: str, tmp_path: Path) -> None:
    """Two sequences; the first goes on token by token."""
    reference = save_reference(name, tmp_path)
    model = load_model(tmp_path, device="cpu")
    prompts = [draw(45), draw(19, seed=4)]
    expected = [reference_logits(reference, prompt) for prompt in prompts]
    session = PagedSession(model, 2)
    found = session.feed([prompts[0][:29], prompts[1]])
    found[0] = torch.cat([found[0], *(session.feed([[token], []])[0] for token in prompts[0][29:])])
    for ours, theirs in zip(found, expected, strict=True):
        assert theirs.abs().max() > 0.5
        assert (ours - theirs).abs().max() <= TOLERANCE


@pytest.mark.sweep_but(1)
@pytest.mark.parametrize(
    "name", ["olmo2", "smollm3", "granite", "phi3-plain", "phi3-window", "glm", "gemma3"]
)
def test_greedy_isd_and_gated_isd_answer_as_ar(name: str, written: Any, tmp_path: Path) -> None:
    """With static passes, as in CUDA graphs, too."""
    prompts = prompts_of([1, 7, 30, 12], vocab_size=MASK_ID)
    base = written(name)
    expected = answers(clear_answers(build_engine(base, "ar"), prompts, greedy(max_tokens=12)))
    targets = [one.rpartition(".")[2] for one in module_names(base)]
    gated = write_adapter(
        tmp_path / "gated", base, mask_token_id=MASK_ID, stride=STRIDE, targets=tuple(dict.fromkeys(targets))
    )
    for checkpoint, strategy, options in ((base, "tree", {}), (gated, "branch", {"graphs": "on"})):
        engine = build_engine(checkpoint, "isd", stride=STRIDE, rejection_strategy=strategy, **options)
        assert answers(engine.generate(prompts, greedy(max_tokens=12))) == expected


def module_names(directory: Path) -> list[str]:
    """Linear modules of the layers as an adapter names them."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(directory)
    modules = model.model.layers.named_modules()
    return [name for name, module in modules if isinstance(module, torch.nn.Linear)]


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["granite", "phi3", "gemma3"])
def test_isd_has_the_law_of_the_base(name: str, written: Any) -> None:
    """Of scaled logits, of a rotation that changes with the length, and of layers that see windows."""
    base = written(f"{name}-law")
    engine = harness.build_engine(base, "isd", stride=STRIDE, rejection_strategy="branch")
    sampled = harness.sample(engine, [(harness.PROMPT, harness.NEUTRAL)], 3000)
    found = harness.fits(base, sampled)
    assert not harness.misfits(found, 1e-6), found
    assert 0.02 < sampled.acceptance < 0.98, sampled.acceptance


@pytest.mark.sweep_but(1)
@pytest.mark.parametrize(
    "name", ["olmo2-biased", "smollm3-interval", "granite-biased", "phi3", "glm4", "gemma3-scaled"]
)
def test_two_ranks_answer_as_one(name: str, written: Any, pair: TensorParallelGroup, tmp_path: Path) -> None:
    """With an adapter, whose matrices are divided like those of the base."""
    prompts = prompts_of([1, 7, 30, 12], vocab_size=MASK_ID)
    targets = tuple(dict.fromkeys(one.rpartition(".")[2] for one in module_names(written(name))))
    gated = write_adapter(
        tmp_path, written(name), mask_token_id=MASK_ID, stride=STRIDE, targets=targets, size=0.1
    )
    one = clear_answers(build_engine(gated, "isd", stride=STRIDE), prompts, greedy(max_tokens=8))
    both = group_engine(pair, gated, "isd", stride=STRIDE)
    found = both.generate(prompts, greedy(max_tokens=8))
    assert answers(found) == answers(one)
    assert [each.accepted_by_position for each in found] == [each.accepted_by_position for each in one]


def test_accelerators_and_canvases_refuse_what_they_do_not_compute(written: Any) -> None:
    with pytest.raises(UserError, match="IDLM-0460.*(\n.*)*see a window of positions"):
        build_engine(written("gemma3"), "ar", accelerators="quest")
    outline = read_outline(written("olmo2"))
    policy = KVWritePolicy(kind="none")
    with pytest.raises(UserError, match="IDLM-0471.*are not those of Llama"):
        resolve_canvases(EngineSettings(memory="mosaic"), policy, outline, ())
