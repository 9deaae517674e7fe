"""fp8 weights and an fp8 KV cache: exactly the model of the rounded numbers, decoded as any other is, and
reported as lossy."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from idlm.infer.decoders.rejection import STRATEGIES
from idlm.infer.engine import Engine
from idlm.infer.memory import base as caching
from idlm.infer.models import dense, fp8
from idlm.infer.models.base import Shards
from idlm.kernels.linear import Fp8Weight, dequantised, quantise_fp8
from tests.adapters import write_adapter
from tests.contracts.engines import (
    CYCLE,
    MASK_ID,
    acceptance_of,
    answers,
    assert_idle,
    build_engine,
    clear_answers,
    greedy,
    prompts_of,
    watch_passes,
    write_converted_toy,
)
from tests.errors import refused
from tests.ranks import group_engine, group_of_threads
from tests.toy import ARCHITECTURES, load_model

OPTIONS: list[dict[str, Any]] = [
    {"weights": "fp8"},
    {"kv_cache": "fp8"},
    {"weights": "fp8", "kv_cache": "fp8"},
]
AS_ON_A_GPU: dict[str, Any] = {"graphs": "on", "num_inflight_steps": 3}
TOLERANCE = {"atol": 1e-5, "rtol": 1e-5}
WEIGHTS = "model.safetensors"

pytestmark = pytest.mark.filterwarnings("ignore:stride")


@pytest.fixture(scope="module", params=ARCHITECTURES)
def random_toy(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With biases, where the family has them, that are not zero."""
    toy = write_converted_toy(tmp_path_factory.mktemp(request.param), request.param)
    _rewrite(toy, lambda name, tensor: tensor + 0.3 if name.endswith("bias") else tensor)
    return toy


def _rewrite(toy: Path, change: Callable[[str, Tensor], Tensor], **more: Tensor) -> Path:
    tensors = {name: change(name, tensor) for name, tensor in load_file(toy / WEIGHTS).items()}
    save_file({**tensors, **more}, toy / WEIGHTS, metadata={"format": "pt"})
    return toy


def _copy(toy: Path, to: Path, change: Callable[[str, Tensor], Tensor] = lambda _, tensor: tensor) -> Path:
    to.mkdir()
    for file in toy.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    return _rewrite(to, change)


def _logits(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Of every pass of a run with chunked prompts, drafts and rejections."""
    seen = watch_passes(engine, monkeypatch)
    engine.generate(prompts_of([1, 7, 30, 5]), greedy(max_tokens=6))
    return [logits_XV for _, logits_XV in seen]


def _assert_equal(found: list[Tensor], expected: list[Tensor], other: list[Tensor]) -> None:
    """Pass by pass; `other`, without rounding, is far enough away to be told apart."""
    assert len(found) == len(expected) > 4
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, **TOLERANCE)
    assert (found[0] - other[0]).abs().max() > 1e-2


def test_the_logits_are_those_of_the_rounded_weights(
    random_toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rounded(name: str, weight: Tensor) -> Tensor:
        if not name.endswith("_proj.weight"):
            return weight
        quantised = quantise_fp8(weight)
        return dequantised(quantised.values_ED, quantised.scale_E)

    reference = _copy(random_toy, tmp_path / "rounded", rounded)
    found, expected, plain = (
        _logits(build_engine(path, "isd", stride=3, **options), monkeypatch)
        for path, options in ((random_toy, {"weights": "fp8"}), (reference, {}), (random_toy, {}))
    )
    _assert_equal(found, expected, plain)


@pytest.mark.sweep_but("Llama-False")
@pytest.mark.sweep_but(random_toy="Qwen3", has_scales=True)
@pytest.mark.parametrize("has_scales", [False, True])
def test_the_logits_are_those_of_rounded_keys_and_values(
    random_toy: Path, has_scales: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scales of the checkpoint, one for a layer or one per head, are used; a cache of 32 bits needs none."""
    scales_2LK = torch.ones(2, 2, 2)
    toy = random_toy
    if has_scales:
        toy = _copy(random_toy, tmp_path / "scaled")
        scales_2LK = torch.tensor([[[0.3, 0.3], [0.02, 1.7]], [[0.6, 0.01], [2.5, 2.5]]])
        named = {
            f"model.layers.{layer}.self_attn.{which}_scale": scales_2LK[number, layer].clone()
            for number, which in enumerate("kv")
            for layer in range(2)
        }
        named["model.layers.0.self_attn.k_scale"] = torch.tensor(0.3)
        named["model.layers.1.self_attn.v_scale"] = torch.tensor([2.5])
        _rewrite(toy, lambda _, tensor: tensor, **named)
    plain_op, num_calls = dense.qkv_rope_cache, 0

    def rounding_op(qkv: Tensor, *caches: Tensor, **options: Any) -> Tensor:
        nonlocal num_calls
        queries = plain_op(qkv, *caches, **options)
        slots = options["slot_mapping_R"][options["slot_mapping_R"] >= 0]
        for cache, scale_K in zip(caches, scales_2LK[:, num_calls % 2], strict=True):
            stored = (cache[slots] / scale_K[:, None]).clamp(-448, 448).to(torch.float8_e4m3fn)
            cache[slots] = stored.float() * scale_K[:, None]
        num_calls += 1
        return queries

    found = _logits(build_engine(toy, "isd", stride=3, kv_cache="fp8"), monkeypatch)
    plain = _logits(build_engine(toy, "isd", stride=3), monkeypatch)
    reference = build_engine(toy, "isd", stride=3)
    monkeypatch.setattr(dense, "qkv_rope_cache", rounding_op)
    _assert_equal(found, _logits(reference, monkeypatch), plain)


@pytest.mark.sweep_but(options={"weights": "fp8", "kv_cache": "fp8"})
@pytest.mark.decides
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_greedy_isd_equals_greedy_ar_of_the_same_setting(foreseeing: Path, options: dict[str, Any]) -> None:
    prompts = prompts_of([1, 7, 30, 5, 17], vocab_size=CYCLE)
    expected = clear_answers(build_engine(foreseeing, "ar", **options), prompts, greedy(max_tokens=16))
    for strategy in STRATEGIES.names():
        engine = build_engine(
            foreseeing, "isd", stride=4, rejection_strategy=strategy, **AS_ON_A_GPU, **options
        )
        found = engine.generate(prompts, greedy(max_tokens=16))
        assert answers(found) == answers(expected)
        assert 0.1 < acceptance_of(found) < 0.95
        assert_idle(engine)


@pytest.mark.decides
@pytest.mark.parametrize("strategy", ["branch"])
def test_an_adapter_on_an_eight_bit_base_answers_as_that_base(
    foreseeing: Path, strategy: str, tmp_path: Path
) -> None:
    adapter = write_adapter(tmp_path / "adapter", foreseeing, mask_token_id=MASK_ID, stride=4, size=0.12)
    prompts, options = prompts_of([1, 7, 30], vocab_size=CYCLE), OPTIONS[2]
    expected = clear_answers(build_engine(foreseeing, "ar", **options), prompts, greedy(max_tokens=12))
    engine = build_engine(adapter, "isd", rejection_strategy=strategy, **options)
    found = engine.generate(prompts, greedy(max_tokens=12))
    assert answers(found) == answers(expected)
    assert 0.1 < acceptance_of(found) < 0.95
    assert all(done.exactness == "lossy" for done in found)


@pytest.mark.sweep
def test_two_ranks_that_round_their_own_parts_decode_as_one_engine(foreseeing: Path) -> None:
    prompts = prompts_of([1, 7, 30], vocab_size=CYCLE)
    with group_of_threads(2) as group:
        found = []
        # A group of ranks has one engine at a time.
        for decoder, more in (("ar", {}), ("isd", {"stride": 4, **AS_ON_A_GPU})):
            engine = group_engine(group, foreseeing, decoder, **OPTIONS[2], **more)
            found.append(answers(engine.generate(prompts, greedy(max_tokens=12))))
            assert isinstance(engine._parts.model.trunk.layers[0].o, Fp8Weight)
        assert found[0] == found[1]


@pytest.mark.parametrize("options", [{}, *OPTIONS[:2]], ids=str)
def test_answers_are_labelled_lossy(foreseeing: Path, options: dict[str, Any]) -> None:
    for decoder in ("ar", "isd"):
        [done] = build_engine(foreseeing, decoder, **options).generate([[3, 1, 4]], greedy(max_tokens=4))
        assert done.exactness == ("lossy" if options else "exact")


def test_the_same_memory_holds_more_pages(foreseeing: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caching, "CPU_POOL_BYTES", 1 << 17)
    engines = [build_engine(foreseeing, "ar", kv_cache=bits) for bits in ("auto", "fp8")]
    caches = [engine._parts.runner._cache for engine in engines]
    assert engines[1].pool.num_pages == 4 * engines[0].pool.num_pages
    assert caches[0].keys.nbytes == caches[1].keys.nbytes


@pytest.mark.parametrize("is_adapted", [False, True])
def test_no_projection_is_kept_twice(
    foreseeing: Path, is_adapted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the next one is rounded, the memory of all before it is free."""
    path = foreseeing
    if is_adapted:
        path = write_adapter(tmp_path / "adapter", foreseeing, mask_token_id=MASK_ID, stride=4)
    trunk = load_model(path, device="cpu").trunk
    originals: list[Any] = []
    for layer in trunk.layers:
        for name in fp8.PROJECTIONS:
            weight = layer.lora[name].stacked if is_adapted else getattr(layer, name)
            originals.append(weakref.ref(weight.untyped_storage()))
            del weight
    num_alive = []

    def watched(weight: Tensor) -> Fp8Weight:
        num_alive.append(sum(original() is not None for original in originals))
        return quantise_fp8(weight)

    monkeypatch.setattr(fp8, "quantise_fp8", watched)
    fp8.quantise(trunk)
    assert num_alive == list(range(len(originals), 0, -1))
    assert all(original() is None for original in originals)
    stayed = {name for name, _ in trunk.named_parameters() if "norm" not in name and "b_Er" not in name}
    assert stayed == {"embed", "head"}


def test_a_rank_takes_the_scales_of_its_own_heads(tmp_path: Path) -> None:
    toy = write_converted_toy(tmp_path / "toy")
    names = dense.TensorNames().kv_scales(load_model(toy, device="cpu").spec.num_layers)
    named = {name: torch.tensor([1.0, 2.0]) * (1 + number) for number, name in enumerate(names)}
    _rewrite(toy, lambda _, tensor: tensor, **named)
    scales = load_model(toy, device="cpu", shards=Shards(rank=1, size=2)).kv_scales
    assert scales is not None
    assert scales.tolist() == [[[2.0], [4.0]], [[6.0], [8.0]]]


@pytest.mark.parametrize("bad", [None, 0.0, float("nan"), [1.0, 2.0, 3.0]])
def test_scales_that_are_none_are_refused(tmp_path: Path, bad: Any) -> None:
    toy = write_converted_toy(tmp_path / "toy")
    names = dense.TensorNames().kv_scales(load_model(toy, device="cpu").spec.num_layers)
    named = {name: torch.tensor(1.0) for name in names[:-1]}
    if bad is not None:
        named[names[-1]] = torch.tensor(bad)
    _rewrite(toy, lambda _, tensor: tensor, **named)
    error = refused("IDLM-0614", load_model, toy, device="cpu")
    assert names[-1] in error.message


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        ({"weights": "int8"}, "IDLM-0415", "weights: got 'int8' (text), expected one of: auto, fp8"),
        ({"kv_cache": "fp8", "attention": "triton"}, "IDLM-0422", "attention=triton, kv_cache=fp8"),
    ],
)
def test_what_cannot_be_had_is_refused(
    foreseeing: Path, options: dict[str, Any], code: str, words: str
) -> None:
    error = refused(code, build_engine, foreseeing, "ar", **options)
    assert words in error.message


def test_a_gpu_without_eight_bit_floats_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    error = refused("IDLM-0447", fp8.check_device, device)
    assert "8.0" in error.message
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    fp8.check_device(device)
