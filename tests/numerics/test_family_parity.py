"""Families that decode in blocks, against independent references: prefill, denoising and commit.

Where transformers has the modules it is the reference, with the visibility given as a mask; else plain
PyTorch. R rows fed this pass, V vocabulary, L sequence length."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from idlm.contracts import SamplingParams
from idlm.infer.models.moe import MoeLayer
from idlm.semantics import Semantics
from tests.block_reference import NEVER, Rules, Sampling, SlowBlocks
from tests.contracts.engines import build_engine
from tests.numerics import llada2_reference
from tests.numerics.test_model_parity import VOCAB, PagedSession, save_reference
from tests.toy import load_model

TOLERANCE = 1e-4
VISIBLE = 1e-2
"""Every fault must change some logit by at least this much, or the parity would prove nothing."""
BLOCK = 4
MASK = 90
PROMPT_LENGTHS = (2 * BLOCK, 2 * BLOCK + 1, 3 * BLOCK - 1, BLOCK, BLOCK - 1, 1)
Logits = Callable[[list[int], int], torch.Tensor]


def visibility(length: int, block_size: int) -> torch.Tensor:
    """Visibility [L, L]: each position sees its block and the blocks before."""
    blocks = torch.arange(length) // block_size
    return blocks[:, None] >= blocks


def as_transformers(reference: Any) -> Logits:
    def logits(token_ids: list[int], block_size: int) -> torch.Tensor:
        visible_LL = visibility(len(token_ids), block_size)
        bias_LL = torch.zeros(visible_LL.shape).masked_fill(~visible_LL, torch.finfo(torch.float32).min)
        with torch.inference_mode():
            given = reference(torch.tensor([token_ids]), attention_mask=bias_LL[None, None])
            return torch.as_tensor(given.logits[0])

    return logits


def rewrite_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def sdar(directory: Path) -> Logits:
    reference = save_reference("qwen3", directory)
    rewrite_config(directory, architectures=["SDARForCausalLM"], model_type="sdar")
    Semantics(causality="block", logit_shift=False, block_size=BLOCK, mask_token_id=MASK).save(directory)
    return as_transformers(reference)


def sdar_moe(directory: Path) -> Logits:
    reference = save_reference("qwen3-moe", directory)
    rewrite_config(
        directory, architectures=["SDARMoeForCausalLM"], model_type="sdar_moe", norm_topk_prob=True
    )
    Semantics(causality="block", logit_shift=False, block_size=BLOCK, mask_token_id=MASK).save(directory)
    return as_transformers(reference)


def fast_dllm(directory: Path) -> Logits:
    reference = save_reference("qwen2", directory)
    rewrite_config(
        directory,
        architectures=["Fast_dLLM_QwenForCausalLM"],
        model_type="Fast_dLLM_Qwen",
        bd_size=BLOCK,
        mask_token_id=MASK,
    )
    return as_transformers(reference)


def llada2(
    directory: Path,
    *,
    fault: str = "",
    has_qk_norm: bool = True,
    likely: tuple[int, ...] = (),
    **changes: Any,
) -> Logits:
    """`likely`: tokens that are predicted more often than others."""
    config = llada2_reference.CONFIG | changes
    tensors = llada2_reference.random_tensors(config, has_qk_norm=has_qk_norm)
    tensors["lm_head.weight"][list(likely)] *= 1.6
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "model.safetensors")
    reference = llada2_reference.Reference(config, tensors, fault)
    return lambda token_ids, block_size: reference(token_ids, visibility(len(token_ids), block_size))


def llada22(directory: Path, **options: Any) -> Logits:
    """Routing by blocks, which `block_size` counts like the decoder."""
    return llada2(directory, **{**llada2_reference.CONFIG22, **options})


def llada2_bare(directory: Path) -> Logits:
    """Variants: no norms of queries and keys, biases, a fully rotated head."""
    return llada2(directory, has_qk_norm=False, use_qkv_bias=True, partial_rotary_factor=1.0, rotary_dim=12)


FAMILIES = {
    "sdar": sdar,
    "sdar_moe": sdar_moe,
    "fast_dllm": fast_dllm,
    "llada2": llada2,
    "llada2_bare": llada2_bare,
    "llada22": llada22,
}


def draw(num: int, seed: int) -> list[int]:
    return torch.randint(0, MASK, (num,), generator=torch.Generator().manual_seed(seed)).tolist()


def engine_logits(directory: Path, tokens: list[int]) -> torch.Tensor:
    """Logits [L, V] of a sequence that is fed at once."""
    return PagedSession(load_model(directory, device="cpu"), 1).feed([tokens], block_size=BLOCK)[0]


class BlockDecoding:
    """Packed prompts of many lengths; each step is checked against a recomputation of all rows."""

    def __init__(self, session: PagedSession, reference: Logits) -> None:
        self.session, self.reference = session, reference
        self.stored: list[list[int]] = [[] for _ in PROMPT_LENGTHS]

    def feed(self, chunks: list[list[int]], num_kept: list[int] | None = None) -> None:
        found = self.session.feed(chunks, block_size=BLOCK, num_kept=num_kept)
        for number, (chunk, logits_RV) in enumerate(zip(chunks, found, strict=True)):
            before = self.stored[number]
            if chunk:
                expected = self.reference(before + chunk, BLOCK)[len(before) :]
                assert (logits_RV - expected).abs().max() <= TOLERANCE, (number, len(before), chunk)
            self.stored[number] = before + chunk[: len(chunk) if num_kept is None else num_kept[number]]


@pytest.mark.sweep_but("sdar")
@pytest.mark.parametrize("family", FAMILIES)
def test_prefill_denoising_and_commit_equal_the_reference(family: str, tmp_path: Path) -> None:
    reference = FAMILIES[family](tmp_path)
    model = load_model(tmp_path, device="cpu")
    assert (model.semantics.causality, model.semantics.mask_token_id) == ("block", MASK)
    decoding = BlockDecoding(PagedSession(model, len(PROMPT_LENGTHS)), reference)
    prompts = [draw(length, seed) for seed, length in enumerate(PROMPT_LENGTHS)]
    decoding.feed([prompt[: len(prompt) // BLOCK * BLOCK] for prompt in prompts])
    clean = [
        prompt[len(prompt) // BLOCK * BLOCK :] + draw(BLOCK - len(prompt) % BLOCK, 50 + n)
        for n, prompt in enumerate(prompts)
    ]
    nothing, masks = [0] * len(prompts), [MASK] * BLOCK
    tails = [len(prompt) % BLOCK for prompt in prompts]
    decoding.feed([block[:t] + masks[t:] for block, t in zip(clean, tails, strict=True)], nothing)
    # Some finish earlier: their clean block is fed with the masks of the next one.
    is_done = [number % 2 == 0 for number in range(len(prompts))]
    half = [
        block + masks if done else [*block[:t], MASK, *block[t + 1 :]]
        for block, t, done in zip(clean, tails, is_done, strict=True)
    ]
    decoding.feed(half, [BLOCK * done for done in is_done])
    decoding.feed([[] if done else block for block, done in zip(clean, is_done, strict=True)])
    decoding.feed([masks] * len(prompts), nothing)
    decoding.feed([draw(BLOCK, 70 + number) for number in range(len(prompts))])


class SlowReference(SlowBlocks):
    """The slow decoder on one of the references."""

    def __init__(self, reference: Logits, rules: Rules) -> None:
        self.reference, self.rules = reference, rules

    def _logits(self, ids: list[int]) -> list[list[float]]:
        logits_LV = self.reference(ids, BLOCK).clone()
        logits_LV[:, MASK] = NEVER
        rows: list[list[float]] = logits_LV.tolist()
        return rows


STRATEGIES: list[dict[str, Any]] = [
    {"strategy": "sequential", "steps": 3},
    {"strategy": "low_confidence_static", "steps": 3},
    {"strategy": "low_confidence_dynamic", "threshold": 0.6},
    {"strategy": "entropy_bounded", "entropy_bound": 1.5},
]
EDITS = {"strategy": "low_confidence_dynamic", "threshold": 0.5, "edit_threshold": 0.3}
"""The only difference of LLaDA2.1 from 2.0; the published mode changes little in a random model."""
CASES = [("sdar", options) for options in STRATEGIES]
CASES += zip(("fast_dllm", "sdar_moe", "llada2"), STRATEGIES, strict=False)
SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "seed": 1},
    {"temperature": 0.7, "top_k": 9, "seed": 2},
    {"temperature": 1.0, "seed": 3},
]
ENGINES: list[dict[str, Any]] = [{"fused_commit": False}, {"graphs": "on", "num_inflight_steps": 2}]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Logits]]:
    """One checkpoint of each family with blocks of `BLOCK`, and its reference."""
    made: dict[str, tuple[Path, Logits]] = {}

    def checkpoint(family: str) -> tuple[Path, Logits]:
        if family not in made:
            directory = tmp_path_factory.mktemp(family)
            reference = FAMILIES[family](directory)
            is_shifted = family == "fast_dllm"
            meaning = Semantics(
                causality="block", logit_shift=is_shifted, block_size=BLOCK, mask_token_id=MASK
            )
            meaning.save(directory)
            made[family] = directory, reference
        return made[family]

    return checkpoint


@pytest.mark.sweep_but(family="fast_dllm", options={"strategy": "sequential", "steps": 3})
@pytest.mark.parametrize(("family", "options"), [*CASES, ("llada2", EDITS)], ids=str)
def test_an_engine_generates_what_a_slow_decoder_does(
    family: str, options: dict[str, Any], checkpoints: Callable[[str], tuple[Path, Logits]]
) -> None:
    """Three blocks, alone and together."""
    directory, reference = checkpoints(family)
    fields = {"edit" if key == "edit_threshold" else key: value for key, value in options.items()}
    rules = Rules(size=BLOCK, mask=MASK, shifted=family == "fast_dllm", **fields)
    slow, maximum = SlowReference(reference, rules), 3 * BLOCK
    # No case has a near tie after these.
    lengths = (2 * BLOCK + 1, BLOCK, BLOCK - 1, 1)
    prompts = [draw(length, seed) for seed, length in enumerate(lengths, start=56)]
    expected = [
        slow.answer(prompt, Sampling(max_tokens=maximum, **sampling))[0]
        for prompt, sampling in zip(prompts, SAMPLINGS, strict=True)
    ]
    assert len({tuple(answer) for answer in expected}) == len(prompts)
    assert slow.num_edits > 0 or options is not EDITS
    params = [
        SamplingParams(**{"seed": 0, **sampling}, max_tokens=maximum, ignore_eos=True)
        for sampling in SAMPLINGS
    ]
    for way in ENGINES:
        engine = build_engine(directory, "block", **options, **way)
        found = [list(answer.token_ids) for answer in engine.generate(prompts, params)]
        assert found == expected, way
    alone = [engine.generate([prompt], one)[0] for prompt, one in zip(prompts, params, strict=True)]
    assert [list(answer.token_ids) for answer in alone] == expected


def test_kv_of_the_last_denoising_step_is_not_that_of_the_clean_block(tmp_path: Path) -> None:
    reference = sdar(tmp_path)
    session = PagedSession(load_model(tmp_path, device="cpu"), 1)
    block, following = draw(BLOCK, 1), [MASK] * BLOCK
    expected = reference(block + following, BLOCK)[BLOCK:]
    session.feed([[*block[:-1], MASK]], block_size=BLOCK)
    assert (session.feed([following], block_size=BLOCK)[0] - expected).abs().max() > VISIBLE


@pytest.mark.parametrize(
    ("write", "fault"),
    [
        *((llada2, fault) for fault in llada2_reference.FAULTS),
        *((llada22, fault) for fault in llada2_reference.BLOCK_FAULTS),
    ],
)
def test_every_misreading_of_llada2_is_visible(write: Any, fault: str, tmp_path: Path) -> None:
    """And of routing by blocks, as in LLaDA2.2."""
    misread = write(tmp_path, fault=fault)
    tokens = draw(3 * BLOCK, 5)
    assert (engine_logits(tmp_path, tokens) - misread(tokens, BLOCK)).abs().max() > VISIBLE


def test_the_router_is_fp32_in_a_bf16_model(tmp_path: Path) -> None:
    llada2(tmp_path, dtype="bfloat16")
    model = load_model(tmp_path, device="cpu")
    layer = model.trunk.layers[1]
    assert isinstance(layer, MoeLayer)
    router, bias = layer.mlp.router, layer.mlp.router_bias
    assert bias is not None and router.dtype == bias.dtype == torch.float32
    x_RD = torch.randn(64, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    experts_RC, weights_RC = layer.mlp.route(x_RD, model.trunk.linears)
    scores_RE = (x_RD.float() @ router.T).sigmoid()
    exact_RC = scores_RE.gather(1, experts_RC)
    exact_RC = 2.5 * exact_RC / exact_RC.sum(dim=1, keepdim=True)
    assert (weights_RC - exact_RC).abs().max() <= 1e-6


def test_a_router_that_is_not_renormalised_is_visible(tmp_path: Path) -> None:
    reference = sdar_moe(tmp_path)
    tokens = draw(3 * BLOCK, 6)
    rewrite_config(tmp_path, norm_topk_prob=False)
    assert (engine_logits(tmp_path, tokens) - reference(tokens, BLOCK)).abs().max() > VISIBLE


@pytest.mark.parametrize("is_tied_in_config", [True, False])
def test_a_head_of_its_own_is_used_whatever_the_config_says(is_tied_in_config: bool, tmp_path: Path) -> None:
    reference = sdar(tmp_path)
    rewrite_config(tmp_path, tie_word_embeddings=is_tied_in_config)
    tokens = draw(BLOCK, 7)
    assert (engine_logits(tmp_path, tokens) - reference(tokens, BLOCK)).abs().max() <= TOLERANCE


def test_rows_of_an_expert_do_not_depend_on_the_batch(tmp_path: Path) -> None:
    reference = llada2(tmp_path)
    model = load_model(tmp_path, device="cpu")
    tokens = [[token] for token in range(0, VOCAB, 5)]
    together = PagedSession(model, len(tokens), num_pages=1).feed(tokens, block_size=BLOCK)
    for token, logits_1V in zip(tokens, together, strict=True):
        assert (logits_1V - reference(token, BLOCK)).abs().max() <= TOLERANCE
