"""What accelerators refuse, and how they are requested."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from idlm.errors import UserError
from idlm.infer import build
from idlm.infer.cli.config import take_accelerator_options, with_options
from idlm.infer.cli.generate import HELP
from idlm.infer.decoders.base import TOKEN_BY_TOKEN
from idlm.infer.settings import EngineSettings, as_options
from idlm.infer.sparse.accelerator import ACCELERATORS, EngineSpec
from idlm.infer.sparse.stack import accelerator_configs, stack_of
from idlm.kernels.paged_attention import HeadShape
from idlm.semantics import Semantics
from tests.errors import refused

LOSSY = [name for name in ACCELERATORS.names() if ACCELERATORS.get(name).exactness == "lossy"]

BAD_SETUP = EngineSpec(
    decoder="ar",
    decoder_options={},
    block_size=None,
    num_layers=4,
    heads=HeadShape(num_heads=4, num_kv_heads=2, head_dim=16, dtype=torch.float32, kv_dtype=torch.float32),
    semantics=Semantics(logit_shift=False),
    num_lanes=2,
    max_slots=32,
    max_rows=64,
    page_size=4,
    device=torch.device("cpu"),
    tensor_parallel=2,
    deterministic=True,
    graphs="on",
)


@pytest.mark.parametrize("name", LOSSY)
def test_a_refusal_lists_every_reason(name: str) -> None:
    error = refused("IDLM-0460", stack_of, accelerator_configs({name: {}, "exact": {}}), BAD_SETUP)
    text = str(error)
    kind = ACCELERATORS.get(name)
    assert ("decoder=ar has no blocks" in text) == kind.needs_blocks
    assert ("graphs=on" in text) != kind.is_static
    assert ("tensor_parallel=2" in text) != kind.shards
    assert "deterministic=true" in text
    assert all(line.startswith(f"  - {name}") for line in text.splitlines()[1:-1])
    assert (f"{name} and exact are both of the kv side" in text) == (kind.side == "kv")


@pytest.mark.parametrize(
    ("options", "reasons"),
    [
        ({"mage": {"k": 0, "exact_layers": -1}}, ["k=0", "exact_layers=-1"]),
        ({"quest": {"k": 0, "page": 0}}, ["k=0", "page=0"]),
        ({"mage": {"exact_layers": 4}}, ["exact_layers=4 thins nothing", "4 layers", "0 to 3"]),
        ({"quest": {"exact_layers": 9}}, ["exact_layers=9 thins nothing"]),
        ({"sparsed": {"exact_share": 0.0, "k": -1}}, ["exact_share=0.0", "k=-1"]),
    ],
    ids=str,
)
def test_numbers_out_of_range_are_named(options: dict[str, dict[str, Any]], reasons: list[str]) -> None:
    setup = dataclasses.replace(
        BAD_SETUP, block_size=8, tensor_parallel=1, deterministic=False, graphs="auto"
    )
    error = refused("IDLM-0460", stack_of, accelerator_configs(options), setup)
    assert all(reason in str(error) for reason in reasons)


@pytest.mark.parametrize(
    ("options", "setup", "reasons"),
    [
        (
            {"alpha": 0.9},
            {"block_size": 1, "num_layers": 1, "decoder_options": {"dual_cache": True}},
            [
                "alpha=0.9 is not a finite number >= 1",
                "two layers, the model has 1",
                "dual_cache",
                "of 1 position",
            ],
        ),
        ({"alpha": float("nan")}, {}, ["alpha=nan"]),
        ({"alpha": float("inf")}, {}, ["alpha=inf"]),
        ({"stability": "plain"}, {"semantics": Semantics()}, ["stability=plain", "neighbour, off"]),
        ({}, {"num_slots": 4}, ["4 slots", "the 8 rows of a block", "2 pages and more"]),
        ({}, {"block_size": None, "decoder": "ar"}, ["decoder=ar has no blocks"]),
    ],
    ids=str,
)
def test_focus_names_every_reason(options: dict[str, Any], setup: dict[str, Any], reasons: list[str]) -> None:
    fitting = {"block_size": 8, "tensor_parallel": 1, "deterministic": False} | setup
    with pytest.raises(UserError, match="IDLM-0460") as refusal:
        stack_of(accelerator_configs({"focus": options}), dataclasses.replace(BAD_SETUP, **fitting))
    assert all(reason in str(refusal.value) for reason in reasons)
    assert len(str(refusal.value).split("\n  - ")) == 1 + max(1, len(reasons) if len(setup) == 3 else 1)


def test_command_lines_set_options_of_accelerators() -> None:
    arguments = [
        "accelerators=[mage,focus]",
        "model=x",
        "accelerators.mage.k=64",
        "accelerators.focus.alpha=2.0",
    ]
    options, rest = take_accelerator_options(arguments)
    assert options == {"mage": {"k": 64}, "focus": {"alpha": 2.0}}
    assert rest == ["model=x", "accelerators=[mage,focus]"]
    settings = with_options({"accelerators": as_options(["mage", "focus"]), "device": "cpu"}, options)
    assert settings == {"accelerators": options, "device": "cpu"}
    with pytest.raises(
        UserError, match=r"(?s)accelerators=\[quest\].*write accelerators=\[mage\] in place of quest"
    ):
        with_options({"accelerators": as_options("quest")}, {"mage": {"k": 3}})
    with pytest.raises(UserError, match=r"(?s)accelerators=\[focus\].*write accelerators=\[focus,mage\], or"):
        with_options({"accelerators": as_options("focus")}, {"mage": {"k": 3}})
    with pytest.raises(UserError, match=r"IDLM-0102.*'maeg'; did you mean 'mage'"):
        with_options({"accelerators": as_options("mage")}, {"maeg": {"k": 3}})
    refused(r"accelerators\.k does not name an accelerator", take_accelerator_options, ["accelerators.k=3"])
    refused("IDLM-0461", take_accelerator_options, ["accelerators=mage,focus"])
    assert take_accelerator_options(["accelerators=null"]) == ({}, ["accelerators=null"])
    assert all(f"accelerators=[{name}]" in HELP.plugin_text() for name in ACCELERATORS.names())


def test_graphs_are_left_off_and_the_log_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    output: list[str] = []
    logger = SimpleNamespace(info=lambda text, *values: output.append(text % values))
    monkeypatch.setattr(build, "get_logger", lambda name: logger)
    model: Any = SimpleNamespace(device=torch.device("cuda"))
    settings = build._resolve_graphs(EngineSettings(), "triton", model, ["mage", "focus"], TOKEN_BY_TOKEN)
    assert (settings.graphs, settings.num_inflight_steps) == ("off", 0)
    assert output == ["graphs=off: CUDA graphs cannot capture steps of accelerator mage, focus"]
    settings = build._resolve_graphs(EngineSettings(), "triton", model, [], TOKEN_BY_TOKEN)
    assert (settings.graphs, settings.num_inflight_steps, len(output)) == ("on", 4, 1)


@pytest.mark.parametrize("given", [{"mage": 256}, 256, [1], "none", "mage,focus", ["mage", "mage"]], ids=str)
def test_a_value_that_is_not_a_list_of_accelerators_is_refused_with_an_example(given: Any) -> None:
    error = refused(r"(?s)IDLM-0461.*accelerators=.*write accelerators=\[mage,focus\]", as_options, given)
    assert str(given) in error.message
