"""The kernels that a warm-up compiles ahead, counted without a GPU: passes on the meta device tell which
variants Triton would compile, and a driver that has no GPU takes the place of CUDA's."""

from __future__ import annotations

import inspect
import itertools
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.models import MODELS
from idlm.infer import build
from idlm.infer.decoders.base import DECODERS, Decoder
from idlm.infer.models.base import FAMILIES
from idlm.infer.models.loader import LoadedModel, make_trunk
from idlm.infer.parts import EngineParts
from idlm.infer.runtime.graphs.warm_up import compile_shapes, step_on_meta
from idlm.infer.runtime.graphs.warm_up_shapes import WarmUpShapes
from idlm.infer.settings import check_options
from idlm.kernels.backend import only_compiled
from idlm.semantics import Semantics
from tests.kernels.hopper_compiler import as_gpu

triton = pytest.importorskip("triton")
CONTEXTS, MIXED_SIZES = (1024, 2048, 4096), (1, 4, 16, 32, 40, 64, 136, 256)
LIMITS, EAGER_ROWS, PROMPT_ROWS = (256, 4096), 512, 8192


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Names of kernels, and how many variants are requested of Triton, of which it compiles none."""
    from triton.runtime.jit import JITFunction

    variants, kernels = Counter[str](), set[Any]()

    def note(self: Any, key: Any, signature: Any, device: int, *_: Any, **__: Any) -> Any:
        variants[self.fn.__name__] += 1
        kernels.add(self)
        self.device_caches[device][0][key] = variants
        return variants

    monkeypatch.setattr(JITFunction, "_do_compile", note)
    with as_gpu(kernels):
        yield variants


def _decoder(name: str, options: dict[str, Any]) -> Decoder:
    chosen = DECODERS.get(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return chosen(chosen.Config(**options), Semantics(mask_token_id=151_935, stride=2))


def _parts(name: str, options: dict[str, Any], *, deterministic: bool) -> EngineParts:
    """What `step_on_meta` reads of an engine of Qwen3-8B's shape."""
    config = {**MODELS["qwen3-8b"], "rms_norm_eps": 1e-6, "rope_theta": 1e6, "hidden_act": "silu"}
    spec = FAMILIES.get("Qwen3ForCausalLM").spec({**config, "tie_word_embeddings": False})
    settings = check_options(
        name, {"warmup": "full", "graphs": "on", "max_num_batched_tokens": PROMPT_ROWS, "page_size": 16}
    ).settings
    settings = replace(settings, max_num_seqs=LIMITS[0], max_length=LIMITS[1], deterministic=deterministic)
    device = torch.device("meta")
    model = LoadedModel(
        trunk=make_trunk(replace(spec, num_layers=1), device=device, dtype=torch.bfloat16),
        spec=spec,
        local=spec,
        semantics=Semantics(mask_token_id=151_935, stride=8),
        architecture="Qwen3ForCausalLM",
        dtype=torch.bfloat16,
        device=device,
        directory=Path(),
    )
    decoder, pool = _decoder(name, options), SimpleNamespace(num_pages=4096)
    parts: Any = SimpleNamespace(model=model, settings=settings, pool=pool, decoder=decoder)
    return parts


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("name", "options", "deterministic", "maximum"),
    [
        ("ar", {}, False, 48),
        ("ar", {}, True, 55),
        ("isd", {"stride": 4, "prompt_lookup_min": 4}, False, 46),
        ("isd", {"stride": 4, "adaptive": True}, False, 61),
        ("isd", {"stride": 4, "adaptive": True}, True, 65),
    ],
    ids=str,
)
def test_few_passes_tell_all_variants_that_a_warm_up_needs(
    name: str, options: dict[str, Any], deterministic: bool, maximum: int, compiled: Counter[str]
) -> None:
    with only_compiled():
        _check_variants(_parts(name, options, deterministic=deterministic), maximum, compiled)


def _check_variants(parts: EngineParts, maximum: int, compiled: Counter[str]) -> None:
    decoder = parts.decoder
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step = step_on_meta(parts, build._assemble)
    assert not hasattr(decoder, "draft_buffer_Z"), "the engine's own decoder stays as it was"
    of = WarmUpShapes(
        decoder=decoder, max_sequences=LIMITS[0], max_length=LIMITS[1], max_prompt_rows=PROMPT_ROWS
    )
    compile_shapes(step, [*of.prompts(EAGER_ROWS), *of.compiled()])
    ahead = Counter(compiled)
    assert 20 < ahead.total() <= maximum, f"each takes a second to compile: {ahead}"
    compile_shapes(step, of.captured(EAGER_ROWS)[:: 1 if decoder.name == "ar" else 5])
    assert compiled == ahead, "a capture would compile"
    mixed = [
        of.shape(mode, size, context, num_prompt_rows=num_rows)
        for mode in {0, len(decoder.modes) - 1}
        for context, size, num_rows in itertools.product(CONTEXTS, MIXED_SIZES, (640, 1408, 4096))
    ]
    compile_shapes(step, mixed)
    assert compiled == ahead, "prompts beside decoding would compile"


def test_a_variant_that_does_not_compile_stops_no_later_one() -> None:
    from triton import AsyncCompileMode
    from triton.runtime._async_compile import active_mode

    def fail() -> None:
        raise RuntimeError("PassManager::run failed")

    callbacks = [print] * (
        len(inspect.signature(AsyncCompileMode.submit).parameters) - len(("self", "key", "fn"))
    )
    step: Any = SimpleNamespace(run=lambda shape: active_mode.get().submit(shape, fail, *callbacks))
    shapes: Any = [1, 2]
    assert compile_shapes(step, shapes) == len(shapes)
    assert active_mode.get() is None
