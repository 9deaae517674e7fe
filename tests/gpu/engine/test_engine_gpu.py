"""The engine on a CUDA device: same answers as on the CPU, the AR law, and a whole conversion."""

from __future__ import annotations

import itertools
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.engine.decoding.harness import SAMPLING, Arm, Load, SteadyEngine, adapted
from benchmarks.models import MODELS, random_model
from idlm.contracts import SamplingParams
from idlm.infer.decoders.rejection import STRATEGIES
from idlm.infer.engine import Engine
from idlm.infer.evaluation.evaluate import evaluate, task_samples
from idlm.infer.models.fp8 import quantise
from idlm.infer.models.loader import LoadedModel
from idlm.tasks import TASKS
from idlm.train.cli import main as train
from tests.adapters import add_selector, write_adapter
from tests.contracts import engines
from tests.contracts.adapters.test_several_adapters import drafts_of
from tests.contracts.engines import answers_and_margins
from tests.law.harness import (
    NEUTRAL,
    PROMPT,
    VOCAB,
    assert_fits,
    build_engine,
    fits,
    misfits,
    sample,
    write_law_toy,
)
from tests.toy import load_model, write_toy_checkpoint

BASE = Path(__file__).parents[3] / "recipes/assets/tiny_ar"
GREEDY = SamplingParams(temperature=0, max_tokens=320)
EIGHT_BITS: dict[str, Any] = {"weights": "fp8", "kv_cache": "fp8", "device": "cuda"}
LEVEL = 1e-6 / 32
DRAWS = 50_000
"""Draws per case; `python -m benchmarks.law` draws a million."""


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny recipe, trained with FlexAttention on the GPU."""
    target = tmp_path_factory.mktemp("converted") / "tiny"
    arguments = ["recipe=tiny", f"output_dir={target}", f"model.path={BASE}", "train.device=cuda"]
    assert train([*arguments, "resume=never"]) == 0
    return target


FOURS = [(name, 4) for name in STRATEGIES.names()]


@pytest.mark.parametrize(("strategy", "stride"), [*FOURS, ("branch", 2), ("tree", 3)])
def test_greedy_isd_equals_greedy_ar(converted: Path, strategy: str, stride: int) -> None:
    prompts = [s.prompt for s in task_samples(TASKS.get("ledger")(level="tiny"), "validation", 40)]
    engine = Engine.from_pretrained(converted, "ar", device="cuda", dtype="float32")
    ar, is_clear = answers_and_margins(engine, prompts, GREEDY)
    assert sum(is_clear) >= 36, "too few answers are free of near ties"
    options = {"stride": stride, "rejection_strategy": strategy, "dtype": "float32", "device": "cuda"}
    isd = Engine.from_pretrained(converted, "isd", **options).generate(prompts, GREEDY)
    for mine, expected, clear in zip(isd, ar, is_clear, strict=True):
        assert mine.token_ids == expected.token_ids or not clear


def test_conversion_on_the_gpu_keeps_the_task_and_accepts_drafts(converted: Path) -> None:
    task = TASKS.get("ledger")(level="tiny")
    engine = Engine.from_pretrained(converted, "isd", stride=4, rejection_strategy="cold", device="cuda")
    result = evaluate(engine, task, task_samples(task, "test", 200), GREEDY)
    assert result.exact_match >= 0.97
    assert result.acceptance_rate is not None
    assert result.acceptance_rate >= 0.85
    assert result.tokens_per_forward >= 2.3


@pytest.mark.parametrize("adaptive", [False, True])
def test_requests_of_one_token_per_pass_equal_greedy_ar(adaptive: bool) -> None:
    """Alone, and in the graphs of passes with drafts."""
    prompts = [s.prompt for s in task_samples(TASKS.get("ledger")(level="tiny"), "validation", 12)]
    converted, options = (
        BASE.parent / "tiny_idlm",
        {"device": "cuda", "dtype": "float32", "deterministic": True},
    )
    expected = Engine.from_pretrained(converted, "ar", **options).generate(prompts, GREEDY)
    engine = Engine.from_pretrained(converted, "isd", adaptive=adaptive, **options)
    single = replace(GREEDY, decoder_options={"stride": 1})
    for params in ([single] * 12, [single, GREEDY] * 6):
        completions = engine.generate(prompts, params)
        assert [done.token_ids for done in completions] == [done.token_ids for done in expected]
        tested = [bool(done.tested_by_position) for done in completions]
        assert not any(tested[::2]) and (params[1] is single or any(tested[1::2]))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_greedy_isd_equals_greedy_ar_in_eight_bits(converted: Path, dtype: str) -> None:
    """Deterministic, because otherwise the rounding of a key could depend on the rows of the pass."""
    prompts = [s.prompt for s in task_samples(TASKS.get("ledger")(level="tiny"), "validation", 40)]
    options = {**EIGHT_BITS, "dtype": dtype, "deterministic": True}
    engines = [Engine.from_pretrained(converted, decoder, **options) for decoder in ("ar", "isd")]
    assert all(engine.settings.graphs == "on" for engine in engines)
    ar, isd = (engine.generate(prompts, GREEDY) for engine in engines)
    assert [done.token_ids for done in isd] == [done.token_ids for done in ar]
    assert all(done.exactness == "lossy" for done in (*ar, *isd))


@pytest.mark.parametrize("choice", ["fixed", "adaptive", "halves"])
def test_an_adapter_with_a_mask_outside_the_embedding_answers_as_its_base(
    tmp_path: Path, choice: str
) -> None:
    """Graphs are warmed up on padding alone, which has no MASK row. In modes with halves too."""
    base = write_toy_checkpoint(tmp_path / "base")
    adapter = write_adapter(tmp_path / "adapter", base, mask_token_id=10_000, stride=4, has_mask_row=True)
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    prompts = [[(7 * i + j) % 40 for j in range(1 + 5 * i)] for i in range(9)]
    options = {"device": "cuda", "dtype": "float32", "deterministic": True}
    expected = Engine.from_pretrained(base, "ar", **options).generate(prompts, params)
    engine = Engine.from_pretrained(adapter, "isd", adaptive=choice != "fixed", **options)
    assert engine.settings.graphs == "on"
    if choice == "halves":
        numbers = [number for number, mode in enumerate(engine.decoder.modes) if mode.narrow is not None]
        calls = itertools.count()
        engine._stride_controller.choose = lambda load: numbers[next(calls) % 2] if load.has_halves else 0
    assert [c.token_ids for c in engine.generate(prompts, params)] == [c.token_ids for c in expected]


@pytest.mark.parametrize("concurrency", [1, 7, 30])
def test_an_adapter_leaves_a_model_of_true_width_its_bits(
    monkeypatch: pytest.MonkeyPatch, concurrency: int
) -> None:
    """Two layers of Qwen3-8B, because the products of a tiny model are never split."""
    monkeypatch.setitem(MODELS, "two layers", {**MODELS["qwen3-8b"], "num_hidden_layers": 2})
    model = random_model("two layers", device="cuda", dtype=torch.bfloat16)
    base = greedy_tokens(model, Arm(name="base", decoder="ar", stride=1, deterministic=True), concurrency)
    with adapted(model, 128):
        arm = Arm(name="adapted", strategy="cold", deterministic=True)
        assert greedy_tokens(model, arm, concurrency) == base


def test_auto_is_deterministic_in_an_engine_of_few_sequences(tmp_path: Path) -> None:
    base = write_toy_checkpoint(tmp_path)
    options = {"device": "cuda", "dtype": "bfloat16", "stride": 4, "mask_token_id": 47, "prefix_cache": False}
    few, many = (
        Engine.from_pretrained(base, "isd", deterministic="auto", max_num_seqs=num, **options)
        for num in (16, 17)
    )
    assert few.settings.is_deterministic and not many.settings.is_deterministic
    params, prompts = engines.greedy(max_tokens=40), engines.prompts_of([*range(3, 80, 5)])
    alone = [few.generate([prompt], params)[0].token_ids for prompt in prompts]
    assert [answer.token_ids for answer in few.generate(prompts, params)] == alone


def greedy_tokens(model: LoadedModel, arm: Arm, concurrency: int) -> dict[str, list[int]]:
    """Answers to random prompts of different lengths."""
    load = Load(concurrency=concurrency, context=40, num_tokens=64, sampling=SAMPLING["greedy"])
    engine = SteadyEngine(model, arm, load).engine
    params = replace(load.sampling, max_tokens=load.num_tokens, ignore_eos=True)
    rng, tokens = torch.Generator().manual_seed(0), {str(number): [] for number in range(concurrency)}
    for number in range(concurrency):
        prompt = torch.randint(0, model.spec.vocab_size - 1, (1 + number % 40,), generator=rng).tolist()
        engine.add_request(str(number), prompt, params)
    while engine._active:
        for event in engine.step():
            tokens[event.request_id] += event.token_ids
    return tokens


def test_another_mix_of_adapters_runs_in_the_same_graphs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts are those of each adapter alone, whichever requests had which when a graph was captured."""
    monkeypatch.setitem(engines.DEVICE, "device", "cuda")
    base = write_toy_checkpoint(tmp_path / "base")
    shape: dict[str, Any] = {"mask_token_id": 10_000, "stride": 4, "has_mask_row": True}
    ranks: dict[str | None, int] = {None: 16, "small": 5, "wide": 40}
    folders = {
        name: write_adapter(tmp_path / str(name), base, rank=rank, seed=rank, **shape)
        for name, rank in ranks.items()
    }
    options: dict[str, Any] = {"graphs": "on", "num_inflight_steps": 0}
    options |= {"max_num_batched_tokens": 64}
    prompts, own = engines.prompts_of([3, 9, 5, 12, 1, 7]), engines.greedy(max_tokens=24)
    alone = {
        name: drafts_of(engines.build_engine(folder, "isd", **options), prompts, [own] * len(prompts))
        for name, folder in folders.items()
    }
    further = {name: str(folder) for name, folder in folders.items() if name is not None}
    engine = engines.build_engine(folders[None], "isd", adapters=further, **options)
    for shift in range(3):
        names = [[*ranks][(number + shift) % 3] for number in range(len(prompts))]
        found = drafts_of(engine, prompts, [replace(own, adapter=name) for name in names])
        assert found == [alone[name][number] for number, name in enumerate(names)]
    assert engine.metrics()["graphs_captured_in_traffic"] > 0


def test_eight_bits_keep_the_task(converted: Path) -> None:
    task = TASKS.get("ledger")(level="tiny")
    engine = Engine.from_pretrained(converted, "isd", stride=4, dtype="bfloat16", **EIGHT_BITS)
    result = evaluate(engine, task, task_samples(task, "test", 200), GREEDY)
    assert result.exact_match >= 0.95
    assert result.tokens_per_forward >= 2
    assert result.exactness == "lossy"


@pytest.mark.alone
def test_quantised_weights_leave_their_memory_to_the_cache(converted: Path) -> None:
    weight = torch.nn.Parameter(torch.randn(4096, 8192, device="cuda", dtype=torch.bfloat16))
    trunk = load_model(converted, device="cuda").trunk
    for layer in trunk.layers:
        layer.down = torch.nn.Parameter(weight.data.clone(), requires_grad=False)
    del layer
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    quantise(trunk)
    freed = before - torch.cuda.memory_reserved()
    assert freed >= 0.95 * len(trunk.layers) * weight.nbytes / 2


@pytest.mark.parametrize(
    ("strategy", "stride"), [*FOURS, ("branch", 2), ("cold", 2), ("tree", 3), ("branch", 8), ("alternate", 8)]
)
def test_joint_draws_have_the_ar_law(tmp_path: Path, stride: int, strategy: str) -> None:
    directory = write_law_toy(tmp_path / "toy")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        options = {"stride": stride, "rejection_strategy": strategy, "device": "cuda", "num_lanes": 512}
        engine = build_engine(directory, "isd", **options)  # type: ignore[arg-type]
    sampled = sample(engine, [(PROMPT, NEUTRAL)], DRAWS, per_request=1000)
    assert not misfits(fits(directory, sampled), LEVEL)


@pytest.mark.usefixtures("on_the_gpu")
@pytest.mark.parametrize("strategy", ["tree", "branch"])
@pytest.mark.parametrize("is_looked_up", [False, True])
def test_drafts_of_a_selector_or_looked_up_leave_the_law(
    tmp_path: Path, strategy: str, is_looked_up: bool
) -> None:
    toy, options, prompt = write_law_toy(tmp_path / "toy"), {"prompt_lookup_min": 1}, (1, 3, 1)
    if not is_looked_up:
        toy, options, prompt = add_selector(toy, vocab_size=VOCAB, width=8), {}, PROMPT
    engine = build_engine(toy, "isd", stride=4, rejection_strategy=strategy, **options)
    settings = [(prompt, replace(NEUTRAL, temperature=each)) for each in (0.7, 1.0, 1.3)]
    assert_fits(
        toy, sample(engine, [*settings, (prompt, replace(NEUTRAL, top_k=3, top_p=0.8))], 20_000), LEVEL
    )


@pytest.mark.usefixtures("on_the_gpu")
@pytest.mark.parametrize("is_looked_up", [False, True])
def test_graphs_select_and_look_up_the_drafts_of_eager_passes(tmp_path: Path, is_looked_up: bool) -> None:
    """And greedy answers are those of AR."""
    toy, prompts = engines.write_converted_toy(tmp_path / "toy"), engines.prompts_of([5, 17, 9, 11])
    options: dict[str, Any] = {"stride": 4}
    if is_looked_up:
        prompts, options["prompt_lookup_min"] = [prompt * 3 for prompt in prompts], 2
    else:
        add_selector(toy, vocab_size=48, width=32)
    drawn = [SamplingParams(max_tokens=40, seed=seed, temperature=0.8, top_p=0.9) for seed in range(4)]
    greedy = [SamplingParams(max_tokens=40, temperature=0)] * 4
    expected = engines.build_engine(toy, "ar").generate(prompts, greedy)
    found = {}
    for graphs in ("on", "off"):
        engine = engines.build_engine(toy, "isd", graphs=graphs, **options)
        assert engine.settings.graphs == graphs
        found[graphs] = engines.answers(engine.generate(prompts, drawn))
        assert engines.answers(engine.generate(prompts, greedy)) == engines.answers(expected)
    assert found["on"] == found["off"]
