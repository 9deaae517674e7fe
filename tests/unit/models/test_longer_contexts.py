"""Longer contexts without training: `rope=ntk` and its factor."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from idlm.contracts import SamplingParams
from idlm.infer.engine import Engine
from idlm.infer.models.base import FAMILIES, ModelSpec
from idlm.infer.models.config import extended
from idlm.semantics import Semantics
from tests.contracts.engines import MASK_ID, clear_answers
from tests.errors import refused
from tests.toy import write_toy_checkpoint

SIZE, TRAINED = 8, 64
CONFIG: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 2,
    "num_attention_heads": 32,
    "head_dim": 128,
    "vocab_size": 11,
    "max_position_embeddings": 4096,
    "rope_theta": 500_000.0,
}


def spec_of(config: dict[str, Any]) -> ModelSpec:
    return FAMILIES.get("Qwen3ForCausalLM").spec(config)


@pytest.mark.parametrize(("factor", "published"), [(4, 14), (6, 31), (8, 55)])
def test_the_base_grows_as_published(factor: float, published: int) -> None:
    """LongLLaDA's factors of LLaDA's base for 16K, 24K and 32K, which it rounds up."""
    spec = spec_of(CONFIG)
    longer = extended(spec, CONFIG, factor)
    for index, (fast, slow) in enumerate(zip(spec.rope_inv_freq, longer.rope_inv_freq, strict=True)):
        grown = (fast / slow) ** (64 / index) if index else published
        assert published - 1 < grown <= published
    assert longer.max_positions == factor * 4096 and longer.trained_length is None


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(
    ("changes", "longest"),
    [
        # As the model cards of Qwen3 and Qwen2.5 say to switch it on.
        ({"max_position_embeddings": 40_960, "rope_scaling": YARN}, 131_072),
        ({"max_position_embeddings": 32_768, "rope_scaling": {**YARN, "type": "yarn"}}, 131_072),
        ({"max_position_embeddings": 32_768, "rope_parameters": YARN | {"rope_theta": 1e6}}, 131_072),
        ({"max_position_embeddings": 4096, "rope_scaling": {"type": "yarn", "factor": 2.0}}, 8192),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, 16_384),
        ({"rope_scaling": {"type": "linear", "factor": 1.5}}, 6144),
        # Where the config states the longer length already.
        ({"max_position_embeddings": 163_840, "rope_scaling": YARN}, 163_840),
        (
            {
                "max_position_embeddings": 131_072,
                "original_max_position_embeddings": 32_768,
                "rope_scaling": YARN,
            },
            131_072,
        ),
        (
            {
                "max_position_embeddings": 131_072,
                "rope_scaling": {**LLAMA3, "original_max_position_embeddings": 8192},
            },
            131_072,
        ),
        ({"rope_scaling": {"type": "linear", "factor": 0.5}}, 4096),
    ],
)
def test_scaled_rotations_lengthen_the_context(changes: dict[str, Any], longest: int) -> None:
    spec = spec_of({**CONFIG, **changes})
    assert (spec.max_positions, spec.trained_length) == (longest, None)


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("toy")
    write_toy_checkpoint(directory, architecture="Qwen3", sharpness=6.0, max_positions=TRAINED)
    meaning = Semantics(causality="block", logit_shift=False, block_size=SIZE, mask_token_id=MASK_ID)
    meaning.save(directory)
    return directory


def test_cached_keys_stay_valid_beyond_the_trained_length(toy: Path, tmp_path: Path) -> None:
    """Answers of prompts in chunks, which grow past the trained length, equal those of a checkpoint that was
    written with the larger base."""
    config = json.loads((toy / "config.json").read_text())
    spec = extended(spec_of(config), config, 4.0)
    other = tmp_path / "other"
    shutil.copytree(toy, other)
    base = spec.rope_inv_freq[1] ** (-spec.head_dim / 2)
    parameters = {"rope_type": "default", "rope_theta": base}
    written = {**config, "max_position_embeddings": 4 * TRAINED, "rope_parameters": parameters}
    (other / "config.json").write_text(json.dumps({**written, "rope_theta": base}))
    prompts = [[(3 * index + number) % MASK_ID for index in range(150)] for number in range(2)]
    params = SamplingParams(temperature=0, max_tokens=2 * SIZE, ignore_eos=True)
    settings: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_num_batched_tokens": 32}
    expected = clear_answers(Engine.from_pretrained(other, **settings), prompts, params)
    found = Engine.from_pretrained(toy, rope="ntk", rope_factor=4.0, **settings).generate(prompts, params)
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]


@pytest.mark.parametrize(
    ("settings", "code", "words"),
    [
        ({"rope": "ntk"}, "IDLM-0415", "rope=ntk with rope_factor=None"),
        ({"rope_factor": 2.0}, "IDLM-0415", "rope=auto with rope_factor=2.0"),
        ({"rope": "ntk", "rope_factor": 1.0}, "IDLM-0415", "rope_factor=1.0 must be a finite number above 1"),
        ({"rope": "ntk", "rope_factor": math.inf}, "IDLM-0415", "rope_factor=inf"),
        ({"rope": "ntk", "rope_factor": 2.0, "max_length": 129}, "IDLM-0420", "more than the 128 positions"),
    ],
)
def test_factors_and_lengths_out_of_range_are_refused(
    toy: Path, settings: dict[str, Any], code: str, words: str
) -> None:
    error = refused(code, Engine.from_pretrained, toy, device="cpu", **settings)
    assert words in error.message


def test_a_checkpoint_that_scales_its_rotation_is_refused(toy: Path, tmp_path: Path) -> None:
    scaled = tmp_path / "scaled"
    shutil.copytree(toy, scaled)
    config = json.loads((toy / "config.json").read_text())
    parameters = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
    (scaled / "config.json").write_text(json.dumps({**config, "rope_parameters": parameters}))
    error = refused("IDLM-0620", Engine.from_pretrained, scaled, device="cpu", rope="ntk", rope_factor=2.0)
    assert "rope_type='linear'" in error.message
