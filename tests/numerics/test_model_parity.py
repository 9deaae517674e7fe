"""Our trunk against transformers on random tiny checkpoints: prompt at once, token by token, fp32, bf16.

R rows fed this pass, V vocabulary, L sequence length."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from idlm.infer.models.loader import LoadedModel
from idlm.infer.runtime.model_runner import PagedKV
from idlm.infer.state.page_pool import KVCache
from idlm.kernels.paged_attention import AttentionRows, plan_attention
from tests.toy import load_model

FP32_TOLERANCE = 1e-5
VOCAB = 97
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": None,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
MOE = {
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3-tied-mqa": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True, "num_key_value_heads": 1}),
    "qwen3-bias": ("Qwen3", {"head_dim": 8, "attention_bias": True}),
    "qwen3-yarn": ("Qwen3", {"head_dim": 16, "rope_parameters": YARN_ROPE}),
    "qwen2": ("Qwen2", {}),
    "qwen2-tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-linear": (
        "Qwen2",
        {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 1e4}},
    ),
    "llama": ("Llama", {"num_key_value_heads": 4}),
    "llama-tied-biased": ("Llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "llama-llama3": ("Llama", {"rope_parameters": LLAMA3_ROPE}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "qwen3-moe": ("Qwen3Moe", {**MOE, "norm_topk_prob": True}),
    "qwen3-moe-some-dense": ("Qwen3Moe", {**MOE, "decoder_sparse_step": 2, "mlp_only_layers": [2]}),
}


def save_reference(name: str, directory: Path, dtype: torch.dtype = torch.float32) -> Any:
    """Save and return a random transformers model whose norms and biases are random as well."""
    import transformers

    family, extra = CASES[name]
    torch.manual_seed(sum(map(ord, name)))
    config = getattr(transformers, f"{family}Config")(**{**COMMON, **extra})
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{family.removesuffix('Text')}ForCausalLM")(config).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "norm" in key:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(std=0.2)
    model = model.to(dtype)
    model.save_pretrained(directory)
    return model


class PagedSession:
    """Two sequences in a scattered paged cache; `feed` runs one packed pass and returns its logits."""

    def __init__(
        self, model: LoadedModel, num_sequences: int, *, page_size: int = 4, num_pages: int = 16
    ) -> None:
        self.model, self.page_size = model, page_size
        spec = model.spec
        shape = (
            spec.num_layers,
            (num_sequences * num_pages + 1) * page_size,
            spec.num_kv_heads,
            spec.head_dim,
        )
        self.cache = KVCache(shape, dtype=model.dtype, device=torch.device("cpu"))
        self.cache.keys.fill_(float("nan"))
        self.cache.values.fill_(float("nan"))
        pages = torch.randperm(num_sequences * num_pages) + 1
        self.block_table = pages.reshape(num_sequences, num_pages)
        self.lengths = [0] * num_sequences

    @torch.inference_mode()
    def feed(
        self, chunks: list[list[int]], *, block_size: int = 1, num_kept: list[int] | None = None
    ) -> list[torch.Tensor]:
        """Append a chunk to every sequence; one logits tensor [len(chunk), V] each. Rows of a block see each
        other. Of a chunk the first `num_kept` rows stay (None: all), the next chunk writes over the others.
        """
        counts = [len(chunk) for chunk in chunks]
        slots = torch.cat([torch.arange(n, n + count) for n, count in zip(self.lengths, counts, strict=True)])
        sequence_R = torch.repeat_interleave(torch.arange(len(chunks)), torch.tensor(counts))
        physical_R = (
            self.block_table[sequence_R, slots // self.page_size] * self.page_size + slots % self.page_size
        )
        lengths = [n + count for n, count in zip(self.lengths, counts, strict=True)]
        ends_R = (slots // block_size + 1) * block_size
        plan = plan_attention(
            AttentionRows(
                cu_rows=torch.tensor([0, *counts]).cumsum(0),
                block_table=self.block_table,
                page_size=self.page_size,
                own_slots_R=slots,
                limits_R=torch.minimum(ends_R, torch.tensor(lengths)[sequence_R]),
                branch_starts_R=slots + 1,
                max_rows=max(counts),
                max_slots=max(lengths),
            )
        )
        scale, others = self.model.spec.score_scale, self.model.spec.variant.others
        window_plan = None
        if others is not None and others.window is not None:
            window_plan = plan_attention(plan.rows.in_windows(others.window, slots))

        ids = torch.tensor([token for chunk in chunks for token in chunk])
        kv = PagedKV(cache=self.cache, slot_mapping_R=physical_R, plan=plan, scale=scale)
        if others is not None:
            kv = replace(kv, window_plan=window_plan, windowed=others.numbers)
        trunk, moe = self.model.trunk, self.model.spec.moe
        logits = trunk.logits(trunk(ids, slots, kv))
        assert logits.dtype == self.model.dtype
        if self.model.dtype == torch.float32 and (moe is None or moe.capacity is None):
            # The last row of each chunk; for an empty one the row before it.
            last_X = (torch.tensor(counts).cumsum(0) - 1).clamp(min=0)
            alone_XV = trunk.logits(trunk(ids, slots, kv, wanted_X=last_X))
            assert (alone_XV - logits[last_X]).abs().max() <= FP32_TOLERANCE
        self.lengths = [n + kept for n, kept in zip(self.lengths, num_kept or counts, strict=True)]
        return list(logits.float().split(counts))


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, VOCAB, (length,), generator=generator).tolist() for length in (45, 19)]


def reference_logits(reference: Any, prompt: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return reference(torch.tensor([prompt])).logits[0].float()


@pytest.mark.sweep_but("llama", "llama-tied-biased")
@pytest.mark.sweep_but(name="qwen2-tied")
@pytest.mark.parametrize("name", CASES)
def test_prefill_and_single_steps_equal_transformers(
    name: str, tmp_path: Path, prompts: list[list[int]]
) -> None:
    reference = save_reference(name, tmp_path)
    model = load_model(tmp_path, device="cpu")
    assert model.dtype == torch.float32
    expected = [reference_logits(reference, prompt) for prompt in prompts]
    for ours, theirs in zip(PagedSession(model, 2).feed(prompts), expected, strict=True):
        assert (ours - theirs).abs().max() <= FP32_TOLERANCE

    session, caches = PagedSession(model, 2), [None, None]
    for step in range(17):
        chunks = [prompt[step : step + 1] for prompt in prompts]
        logits = session.feed(chunks)
        for number, chunk in enumerate(chunks):
            with torch.inference_mode():
                theirs = reference(torch.tensor([chunk]), past_key_values=caches[number], use_cache=True)
            caches[number] = theirs.past_key_values
            assert (logits[number] - theirs.logits[0]).abs().max() <= FP32_TOLERANCE
            assert (logits[number][0] - expected[number][step]).abs().max() <= FP32_TOLERANCE


@pytest.mark.parametrize("layout", ["rope_scaling", "top-level theta"])
def test_rope_layout_of_transformers_4(layout: str, tmp_path: Path, prompts: list[list[int]]) -> None:
    name = "llama-llama3" if layout == "rope_scaling" else "llama"
    reference = save_reference(name, tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    rope["type"] = rope.pop("rope_type")
    config["rope_scaling"] = rope if layout == "rope_scaling" else None
    path.write_text(json.dumps(config))
    ours = PagedSession(load_model(tmp_path, device="cpu"), 2).feed(prompts)[0]
    assert (ours - reference_logits(reference, prompts[0])).abs().max() <= FP32_TOLERANCE


@pytest.mark.parametrize("name", ["qwen2", "llama-llama3"])
def test_bf16_is_as_close_to_the_fp32_law_as_transformers_is(
    name: str, tmp_path: Path, prompts: list[list[int]]
) -> None:
    reference = save_reference(name, tmp_path, torch.bfloat16)
    model = load_model(tmp_path, device="cpu", dtype="auto")
    assert model.dtype == torch.bfloat16
    ours = torch.cat(PagedSession(model, 2).feed(prompts))
    theirs = []
    for attention in ("eager", "sdpa"):
        reference.set_attn_implementation(attention)
        theirs.append(torch.cat([reference_logits(reference, prompt) for prompt in prompts]))
    truth = torch.cat([reference_logits(reference.float(), prompt) for prompt in prompts])
    floor = max(mean_kl(truth, logits) for logits in theirs)
    assert mean_kl(truth, ours) <= 1.25 * floor
    assert mean_kl(theirs[1], ours) <= 1.25 * mean_kl(theirs[1], theirs[0])


def mean_kl(target_RV: torch.Tensor, given_RV: torch.Tensor) -> float:
    """Mean over rows of KL(target || given), nats."""
    return torch.nn.functional.kl_div(
        given_RV.log_softmax(-1), target_RV.log_softmax(-1), log_target=True, reduction="batchmean"
    ).item()
