"""Code in README.md and docs/ runs as it stands: the plug-ins of extending.md, what users type first."""

from __future__ import annotations

import importlib
import json
import re
import runpy
import shlex
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from idlm.contracts import SamplingParams
from idlm.infer.cli.generate import generate
from idlm.infer.decoders.base import DECODERS
from idlm.infer.engine import Engine
from idlm.infer.memory.base import MEMORY_MANAGERS
from idlm.infer.models.base import FAMILIES
from idlm.infer.sparse.accelerator import ACCELERATORS
from idlm.registry import Registry
from idlm.semantics import Semantics
from idlm.tasks import TASKS
from idlm.tasks.base import split_of_skeleton
from idlm.text.tokenizer import load_tokenizer
from idlm.train.config.data import DataConfig
from idlm.train.data.base import SOURCES, Encoder
from idlm.train.objectives.base import OBJECTIVES, Head, TermRequest
from tests.tiny_training import VOCAB, batch_of, random_sample, stage_of
from tests.toy import write_toy_checkpoint

ROOT = Path(__file__).resolve().parents[3]
EXTENDING = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
PLUG_IN = re.compile(r"<!-- plug-in: ([\w ]+) -->\n```python\n(.*?)```", re.DOTALL)
PLUG_INS = dict(PLUG_IN.findall(EXTENDING))
REGISTRIES: dict[str, Registry[Any]] = {
    "decoder": DECODERS,
    "accelerator": ACCELERATORS,
    "family": FAMILIES,
    "memory manager": MEMORY_MANAGERS,
    "objective": OBJECTIVES,
    "task": TASKS,
    "data source": SOURCES,
}
TINY = ROOT / "recipes" / "assets" / "tiny_ar"
SPARE_ROW = 170
Install = Callable[[str], Registry[Any]]


@pytest.fixture
def install(tmp_path: Path) -> Iterator[Install]:
    """Put the plug-in of a kind into its package's folder, as one new file; afterwards nothing is left."""
    undo: list[Callable[[], None]] = []

    def put(kind: str) -> Registry[Any]:
        registry = REGISTRIES[kind]
        registry.names()
        package: ModuleType = importlib.import_module(str(registry.package))
        folder = tmp_path / "plug_in"
        folder.mkdir()
        (folder / "plug_in_of_docs.py").write_text(PLUG_INS[kind], encoding="utf-8")
        members, path = dict(registry._members), package.__path__
        package.__path__ = [*path, str(folder)]
        registry._is_scanned = False

        def remove() -> None:
            registry._members, package.__path__ = members, path
            sys.modules.pop(f"{registry.package}.plug_in_of_docs")

        undo.append(remove)
        return registry

    yield put
    for remove in undo:
        remove()


def engine_of(directory: Path, decoder: str | None = None, **options: Any) -> Engine:
    settings = {"device": "cpu", "dtype": "float32", "max_num_seqs": 4, "max_length": 64}
    return Engine.from_pretrained(directory, decoder, **settings, **options)


def test_every_kind_has_a_plug_in() -> None:
    assert set(PLUG_INS) == set(REGISTRIES)


def test_the_decoder(install: Install, tmp_path: Path) -> None:
    toy = write_toy_checkpoint(tmp_path / "toy")
    install("decoder")
    params = SamplingParams(temperature=0, max_tokens=12)
    [plain] = engine_of(toy, "ar").generate([[1, 2, 3]], params)
    [found] = engine_of(toy, "ar_without", token_id=plain.token_ids[0]).generate([[1, 2, 3]], params)
    assert plain.token_ids[0] not in found.token_ids
    assert len(found.token_ids) == 12 and found.exactness == "lossy"


def test_the_accelerator(install: Install, tmp_path: Path) -> None:
    toy = write_toy_checkpoint(tmp_path / "toy", max_positions=64)
    Semantics(causality="block", logit_shift=False, block_size=4, mask_token_id=47).save(toy)
    install("accelerator")
    params = SamplingParams(temperature=0, max_tokens=12)
    prompt = list(range(1, 30))
    [exact] = engine_of(toy).generate([prompt], params)
    [whole] = engine_of(toy, accelerators="sink").generate([prompt], params)
    assert whole.token_ids == exact.token_ids and whole.exactness == "lossy"
    thin = engine_of(toy, accelerators={"sink": {"sink": 1, "window": 1}})
    assert thin.generate([prompt], params)[0].token_ids != exact.token_ids


def test_the_model_family(install: Install, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    toy = write_toy_checkpoint(tmp_path / "toy", architecture="Llama")
    params = SamplingParams(temperature=0, max_tokens=8)
    [expected] = engine_of(toy).generate([[1, 2, 3]], params)
    config = json.loads((toy / "config.json").read_text())
    (toy / "config.json").write_text(json.dumps(config | {"architectures": ["AcmeForCausalLM"]}))
    tensors = load_file(toy / "model.safetensors")
    tensors["model.wte.weight"] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, toy / "model.safetensors")
    install("family")
    assert engine_of(toy).generate([[1, 2, 3]], params)[0].token_ids == expected.token_ids


def test_the_memory_manager(install: Install, tmp_path: Path) -> None:
    toy = write_toy_checkpoint(tmp_path / "toy")
    install("memory manager")
    engine = engine_of(toy, memory="frugal")
    assert engine.pool.num_pages >= 1
    assert engine.generate([[1, 2, 3]], SamplingParams(max_tokens=4, seed=1))[0].finish_reason == "length"


def test_the_objective(install: Install) -> None:
    made = install("objective").get("ar_late")(mask_token_id=None, mask_region="response")
    plain = OBJECTIVES.get("ar")(mask_token_id=None, mask_region="response")
    stage, sample = stage_of(1), random_sample(3, prompt=4, response=9)
    torch.manual_seed(0)
    batch, head = batch_of([sample], plain, stage), Head(weight_VD=torch.randn(VOCAB, 16))
    hidden_BTD = torch.randn(1, len(sample), 16)
    request = TermRequest(stage=stage, coefficients=torch.ones(1))
    found, expected = (each.terms(head, hidden_BTD, batch, request) for each in (made, plain))
    assert expected.sums.item() * 1.003 < found.sums.item() < expected.sums.item() * 1.013
    assert found.loss.item() == pytest.approx(found.sums.item(), rel=1e-5)


def test_the_task(install: Install) -> None:
    task = install("task").get("backwards")(level="tiny", seed=3, length=5)
    for split in ("train", "validation", "test"):
        sample = task.sample(7, split)
        assert sample == task.sample(7, split) and split_of_skeleton(sample.prompt) == split
        assert task.check(sample.prompt, sample.response).correct
        assert not task.check(sample.prompt, sample.response[:-1]).correct


def test_the_data_source(install: Install, tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("Mia has 5 nuts.")
    (tmp_path / "a.txt").write_text("Lea has 9 shells.")
    encoder = Encoder(load_tokenizer(TINY), mask_token_id=None, use_chat_template=False)
    factory = install("data source").get("text_files")
    source = factory(DataConfig(source="text_files", path=str(tmp_path)), encoder)
    assert source.num_samples == 2 and source.sample(0).origin == "a.txt"
    assert len(source.sample(1)) > 3


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the demo's output as far as commands need it: the base, told to be a converted model."""
    folder = tmp_path_factory.mktemp("workplace")
    shutil.copytree(TINY, folder / "outputs" / "tiny")
    Semantics(mask_token_id=SPARE_ROW, stride=4).save(folder / "outputs" / "tiny")
    return folder


def blocks(page: str, language: str) -> list[str]:
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


@pytest.mark.sweep
@pytest.mark.parametrize("page", ["README.md", "docs/generate.md"])
def test_python_of_a_page_runs(
    page: str, workplace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of a page's code in one namespace, as a reader would type it."""
    monkeypatch.chdir(workplace)
    script = tmp_path / "page.py"
    script.write_text("\n".join(blocks(page, "python")), encoding="utf-8")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        names = runpy.run_path(str(script))
    assert names["answer"].finish_reason == "stop" and names["answer"].exactness == "exact"


def test_the_first_generate_command_runs(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(workplace)
    lines = "\n".join(blocks("README.md", "bash")).splitlines()
    line = next(line for line in lines if line.startswith("idlm-generate model=outputs/tiny "))
    assert generate(shlex.split(line, comments=True)[1:]) == 0
    assert capsys.readouterr().out.strip().splitlines()[-1].startswith("####")
