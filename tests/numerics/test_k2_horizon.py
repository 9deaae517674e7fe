"""K2-Horizon against transformers' Llama with grouped norms in fp32, which is all that differs: prompts,
single tokens, two ranks, an imported adapter, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from idlm.infer.cli.import_adapter import ImportConfig, import_to
from idlm.infer.distributed.launcher import TensorParallelGroup
from tests.adapters import write_adapter
from tests.contracts.engines import answers, build_engine, clear_answers, greedy, prompts_of
from tests.numerics.test_model_parity import PagedSession
from tests.ranks import group_engine, group_of_threads
from tests.toy import load_model
from tests.unit.models.test_loader import refused

VOCAB = 61
YARN = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}


class GroupedNorm(nn.Module):
    """RMSNorm of each of `groups` parts of a row; the weight is applied before rounding."""

    def __init__(self, norm: Any, groups: int) -> None:
        super().__init__()
        self.weight, self.eps, self.groups = norm.weight, norm.variance_epsilon, groups

    def forward(self, x: Tensor) -> Tensor:
        parts = x.float().unflatten(-1, (self.groups, -1))
        parts = parts * torch.rsqrt(parts.square().mean(-1, keepdim=True) + self.eps)
        return (self.weight * parts.flatten(-2)).to(x.dtype)


def write(directory: Path, *, groups: int = 3, rope: dict[str, Any] | None = None, **changes: Any) -> Any:
    """Save a random checkpoint and return its reference."""
    import transformers

    torch.manual_seed(5)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=36,
        intermediate_size=52,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        rms_norm_eps=1e-5,
        rope_parameters=rope or {"rope_type": "default", "rope_theta": 1e4},
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        attn_implementation="eager",
    )
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            # Groups of different sizes of numbers, which one norm of the whole row would treat alike.
            parameter.uniform_(0.5, 1.5) if "norm" in key else parameter.normal_(std=0.2)
        model.model.embed_tokens.weight[:, :12] *= 9
    model.save_pretrained(directory)
    path = directory / "config.json"
    own = {
        "architectures": ["K2HorizonForCausalLM"],
        "model_type": "k2_horizon",
        "layernorm_num_groups": groups,
        "rope_head_dim": 8,
        "query_key_norm": False,
        "attention_gate_func": None,
        "num_experts": 0,
        "mova_num_experts": 0,
        "router_score_func": "sigmoid",
    }
    path.write_text(json.dumps(json.loads(path.read_text()) | own | changes))
    for layer in model.model.layers:
        layer.input_layernorm = GroupedNorm(layer.input_layernorm, groups)
        layer.post_attention_layernorm = GroupedNorm(layer.post_attention_layernorm, groups)
    model.model.norm = GroupedNorm(model.model.norm, groups)
    return model


@pytest.mark.parametrize(("groups", "rope"), [(3, None), (1, YARN), (4, YARN)])
def test_prompts_and_single_steps_equal_the_reference(
    groups: int, rope: dict[str, Any] | None, tmp_path: Path
) -> None:
    reference = write(tmp_path, groups=groups, rope=rope)
    prompt = torch.randint(0, VOCAB, (45,), generator=torch.Generator().manual_seed(3))
    with torch.inference_mode():
        expected = reference(prompt[None]).logits[0]
    session = PagedSession(load_model(tmp_path), 1)
    found = session.feed([prompt[:29].tolist()])
    found += [session.feed([[token]])[0] for token in prompt[29:].tolist()]
    assert expected.abs().max() > 0.5
    assert (torch.cat(found) - expected).abs().max() <= 1e-4


def test_an_imported_adapter_on_two_ranks_answers_as_its_base(tmp_path: Path) -> None:
    base, llama, lora, output = (tmp_path / name for name in ("base", "llama", "lora", "output"))
    write(base)
    write(llama, architectures=["LlamaForCausalLM"], model_type="llama")
    write_adapter(lora, llama, mask_token_id=None, stride=1, size=0.1)
    (lora / "idlm_config.json").unlink()
    given = {"model": str(lora), "base": str(base), "output_dir": str(output)}
    import_to(ImportConfig(**given, gated=True, stride=4, noise_range=[1, VOCAB]))
    prompts = prompts_of([1, 7, 30, 12], vocab_size=VOCAB)
    expected = clear_answers(build_engine(base, "ar", max_length=64), prompts, greedy(max_tokens=8))
    with group_of_threads(2) as pair:
        assert isinstance(pair, TensorParallelGroup)
        engine = group_engine(pair, output, "isd", stride=4, max_length=64)
        assert answers(engine.generate(prompts, greedy(max_tokens=8))) == answers(expected)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"layernorm_num_groups": None}, "layernorm_num_groups missing"),
        ({"layernorm_num_groups": 5}, "layernorm_num_groups=5 does not divide"),
        ({"attention_gate_func": "softplus"}, "attention_gate_func='softplus'"),
        ({"query_key_norm": True}, "query_key_norm=True"),
        ({"num_experts": 8}, "num_experts=8"),
        ({"mova_num_experts": 4}, "mova_num_experts=4"),
        ({"rope_head_dim": 4}, "rope_head_dim=4"),
        ({"use_sliding_window": True}, "use_sliding_window=True"),
    ],
    ids=str,
)
def test_other_members_of_the_family_are_refused(changes: dict[str, Any], word: str, tmp_path: Path) -> None:
    write(tmp_path, **changes)
    refused(tmp_path, "IDLM-0604", word)
