"""Composition gives a plain typed dataclass, or one error listing every mistake with the nearest key (U4)."""

from __future__ import annotations

import dataclasses
import random
import string
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from idlm.config import schema as schemas
from idlm.config.compose import compose, recipes, yaml_text
from idlm.config.suggest import did_you_mean
from idlm.contracts import SamplingParams
from idlm.errors import UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSchema:
    stride: int = field(default=2, metadata={"help": "tokens per forward"})
    clean_weight: float | str = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSchema:
    rank: int = 8
    target: tuple[str, ...] = ("q_proj",)


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimSchema:
    learning_rate: float = field(default=1e-3, metadata={"help": "peak learning rate"})
    weight_decay: float = 0.0
    betas: tuple[float, ...] = (0.9, 0.95)
    schedule: Literal["cosine", "constant"] = "cosine"

    def __post_init__(self) -> None:
        if self.learning_rate <= 0:
            raise ValueError(f"learning_rate={self.learning_rate} must be above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class FixtureSchema:
    model_path: str = field(metadata={"help": "the base checkpoint"})
    output_dir: str = "outputs"
    accumulation: int = 1
    dry_run: bool = False
    max_length: int | None = None
    policy: Literal["drop", "error"] = "error"
    rope: Literal["yarn", "linear"] | float | Literal["dynamic"] | None = None
    strides: list[int] = field(default_factory=lambda: [2, 3, 4])
    arguments: dict[str, Any] = field(default_factory=dict)
    optimizer: OptimSchema = field(default_factory=OptimSchema)
    lora: LoraSchema | None = None
    stages: list[StageSchema] = field(default_factory=list)


@pytest.fixture
def conf(tmp_path: Path) -> Path:
    conf = tmp_path / "conf"
    (conf / "recipe").mkdir(parents=True)
    (conf / "__init__.py").write_text("")
    (conf / "fixture.yaml").write_text("model_path: base\nmax_length: 64\noptimizer:\n  weight_decay: 0.1\n")
    header = "# @package _global_\n"
    (conf / "recipe" / "tiny.yaml").write_text(
        header + "accumulation: 4\noutput_dir: ${model_path}/out\n"
        "stages:\n  - {stride: 3}\n  - {clean_weight: auto}\n"
    )
    (conf / "recipe" / "tiny_lora.yaml").write_text(header + "defaults: [tiny, _self_]\nlora: {rank: 16}\n")
    return conf


def fixture(conf: Path, *overrides: str) -> FixtureSchema:
    return compose("fixture", FixtureSchema, list(overrides), conf_dir=conf)


def refused(conf: Path, *overrides: str, code: str = "IDLM-0101") -> str:
    with pytest.raises(UserError) as caught:
        fixture(conf, *overrides)
    assert caught.value.code == code, str(caught.value)
    return str(caught.value)


def test_defaults_file_recipe_and_overrides_win_in_this_order(conf: Path) -> None:
    assert fixture(conf) == FixtureSchema(
        model_path="base", max_length=64, optimizer=OptimSchema(weight_decay=0.1)
    )
    tiny = fixture(conf, "+recipe=tiny")
    assert tiny.accumulation == 4
    assert tiny.output_dir == "base/out"
    assert tiny.stages == [StageSchema(stride=3), StageSchema(clean_weight="auto")]
    for order in (["accumulation=8", "recipe=tiny"], ["+recipe=tiny", "++accumulation=8"]):
        assert fixture(conf, *order) == dataclasses.replace(tiny, accumulation=8)
    assert fixture(conf, "recipe=tiny_lora").lora == LoraSchema(rank=16)
    assert fixture(conf, "recipe=tiny", "model_path=other").output_dir == "other/out"


@pytest.mark.parametrize(
    ("override", "path", "expected"),
    [
        ("dry_run=true", "dry_run", True),
        ("+max_length=null", "max_length", None),
        ("~max_length", "max_length", None),
        ("policy=drop", "policy", "drop"),
        ("strides=[4]", "strides", [4]),
        ("strides=4", "strides", [4]),
        ("arguments={a: 1, b: [x, 'y z']}", "arguments", {"a": 1, "b": ["x", "y z"]}),
        ("arguments.deep.er=1", "arguments", {"deep": {"er": 1}}),
        ("optimizer.learning_rate=1", "optimizer.learning_rate", 1.0),
        ("optimizer.betas=[0.8,1]", "optimizer.betas", (0.8, 1.0)),
        ("lora.rank=4", "lora", LoraSchema(rank=4)),
        ("lora={target: [k, v]}", "lora.target", ("k", "v")),
        ("stages=[{stride: 5},{}]", "stages", [StageSchema(stride=5), StageSchema()]),
        ("output_dir=/a b/c=d(1),e", "output_dir", "/a b/c=d(1),e"),
        ("output_dir=007", "output_dir", "007"),
        ("output_dir=it's #1 [é]{x}", "output_dir", "it's #1 [é]{x}"),
        ("lora={target: [~/a (1)/b=c.x, it's é]}", "lora.target", ("~/a (1)/b=c.x", "it's é")),
        ("lora={target: ['a, b #1 [c]', \"it's\"]}", "lora.target", ("a, b #1 [c]", "it's")),
        ("arguments={path: /a(1)/b=c, eps: 1e-5}", "arguments", {"path": "/a(1)/b=c", "eps": 1e-5}),
        ("output_dir='quoted'", "output_dir", "quoted"),
        ("model_path=x/y", "model_path", "x/y"),
    ],
)
def test_values_arrive_with_the_type_of_the_schema(
    conf: Path, override: str, path: str, expected: Any
) -> None:
    value: Any = fixture(conf, override)
    for name in path.split("."):
        value = getattr(value, name)
    assert value == expected
    assert type(value) is type(expected)


def test_items_of_a_list_can_be_set_one_by_one(conf: Path) -> None:
    assert fixture(conf, "recipe=tiny", "stages.1.stride=7").stages[1] == StageSchema(
        stride=7, clean_weight="auto"
    )
    assert "stages.2.stride is not there" in refused(conf, "recipe=tiny", "stages.2.stride=7")


def test_all_problems_come_in_one_error(conf: Path) -> None:
    (conf / "recipe" / "bad.yaml").write_text(
        "# @package _global_\noptimiser: {lr: 1}\nstages: [{strid: 2, clean_weight: [1]}]\n"
    )
    (conf / "fixture.yaml").write_text("model_path: ???\n")
    message = refused(
        conf,
        "recipe=bad",
        "acumulation=2",
        "dry_run=1",
        "optimizer.learning_rate=fast",
        "policy=skip",
        "oops",
    )
    for part in (
        "unknown key 'optimiser'; did you mean 'optimizer'?",
        "unknown key 'stages.0.strid'; did you mean 'stages.0.stride'?",
        "stages.0.clean_weight: got [1] (list), expected a number or text",
        "model_path is missing: it needs text",
        "unknown key 'acumulation'; did you mean 'accumulation'?",
        "dry_run: got 1 (integer), expected true or false",
        "optimizer.learning_rate: got 'fast' (text), expected a number",
        "policy: got 'skip' (text), expected one of: drop, error",
        "cannot read 'oops'; write key=value",
    ):
        assert part in message, message


def test_a_folder_is_not_taken_for_a_key_that_the_command_lacks(conf: Path) -> None:
    assert f"cannot read '{conf}'; write key=value" in refused(conf, str(conf))


def test_a_written_configuration_is_read_as_the_same_values(conf: Path, tmp_path: Path) -> None:
    texts = {"t": ["1e-5", "1E5", "007", "~", "on", "2020-01-01", "é #x: y", " ", "a\nb"]}
    values = {"arguments": texts | {"x": 1e-5, "y": 1e300, "z": [1e-9, "1e-9"]}, "model_path": "m" * 200}
    file = tmp_path / "written.yaml"
    file.write_text(yaml_text(values), encoding="utf-8")
    assert "é" in file.read_text(encoding="utf-8")
    read = fixture(conf, f"config={file}")
    assert (read.arguments, read.model_path) == (values["arguments"], values["model_path"])
    rates = "{learning_rate: 1e-5, betas: [9e-1, 1E0]}"
    file.write_text(f"model_path: m\noptimizer: {rates}\narguments: {{a: 2e-3}}\n")
    read = fixture(conf, f"config={file}")
    assert (read.optimizer.learning_rate, read.optimizer.betas) == (1e-5, (0.9, 1.0))
    assert read.arguments == {"a": 2e-3}


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("accumulation=1.5", "accumulation: got 1.5 (number), expected an integer"),
        ("accumulation=true", "accumulation: got True (boolean), expected an integer"),
        ("accumulation=null", "accumulation: got null, expected an integer"),
        ("accumulation=1,2", "several values"),
        ("accumulation=(", "cannot read the value"),
        ("strides=[1,a]", "strides.1: got 'a' (text), expected an integer"),
        ("strides=three", "expected a list of integer items"),
        ("optimizer=3", "optimizer: got 3 (integer), expected a mapping with keys learning_rate"),
        ("optimizer.schedule=linear", "expected one of: cosine, constant"),
        (
            "rope=dynamc",
            "expected one of: yarn, linear or a number or one of: dynamic or null; did you mean 'dynamic'?",
        ),
        ("rope=linaer", "did you mean 'linear'?"),
        ("optimizer.learning_rate=-1", "optimizer: learning_rate=-1.0 must be above 0"),
        ("accumulation.x=1", "unknown key 'accumulation.x'"),
        ("hydra.run.dir=x", "unknown key 'hydra.run.dir'"),
        ("output_dir=${nowhere}", "nowhere"),
    ],
)
def test_wrong_values_name_key_given_and_expected(conf: Path, override: str, expected: str) -> None:
    assert expected in refused(conf, override, code="IDLM-0106" if "$" in override else "IDLM-0101")


def test_unknown_recipes_are_refused_with_the_list(conf: Path) -> None:
    for override in ("recipe=tyni", "+recipe=tyni"):
        message = refused(conf, override, code="IDLM-0104")
        assert "did you mean 'tiny'" in message
        assert "tiny, tiny_lora" in message
    refused(conf, "recipe=nowhere/x.yaml", code="IDLM-0104")
    assert "did you mean 'recipe'?" in refused(conf, "recipie=tiny")
    assert "write recipe=VALUE" in refused(conf, "--recipe=tiny")
    assert "given twice" in refused(conf, "recipe=tiny", "+recipe=tiny_lora")
    assert recipes(conf) == ["tiny", "tiny_lora"]


@pytest.mark.parametrize("header", ["", "# @package _global_\n"])
def test_a_recipe_may_be_given_by_path(conf: Path, tmp_path: Path, header: str) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "tiny.yaml").write_text(header + "defaults: [tiny_lora, sibling, _self_]\naccumulation: 9\n")
    (mine / "sibling.yaml").write_text("# @package _global_\ndry_run: true\n")
    config = fixture(conf, f"recipe={mine}/tiny.yaml", "max_length=3")
    assert (config.accumulation, config.lora, config.dry_run, config.max_length) == (
        9,
        LoraSchema(rank=16),
        True,
        3,
    )
    (mine / "broken.yaml").write_text("a: [1\n")
    assert "line 2" in refused(conf, f"recipe={mine}/broken.yaml", code="IDLM-0105")


@pytest.mark.parametrize(
    ("content", "code", "shown"),
    [
        ("output_dir: ${oops", "IDLM-0106", "${oops"),
        ("output_dir: ${no.such}", "IDLM-0106", "no.such"),
        ("defaults: tiny", "IDLM-0105", "`defaults` is 'tiny'"),
        ("defaults: 3", "IDLM-0105", "`defaults` is 3"),
        ("defaults: [mine]", "IDLM-0105", "names 'mine', which is not another recipe"),
        ("defaults: [ring]", "IDLM-0105", "names 'mine', which is not another recipe"),
        ("- a", "IDLM-0105", "does not hold a mapping"),
        ("null: 3", "IDLM-0105", "not YAML"),
    ],
)
def test_wrong_content_of_a_recipe_is_a_user_error(
    conf: Path, tmp_path: Path, content: str, code: str, shown: str
) -> None:
    (tmp_path / "ring.yaml").write_text("defaults: [mine]\n")
    (tmp_path / "mine.yaml").write_text(f"{content}\n")
    assert shown in refused(conf, f"recipe={tmp_path}/mine.yaml", code=code)


def misspell(key: str, rng: random.Random) -> str:
    """One or two random insertions, deletions, substitutions or neighbour swaps."""
    for _ in range(rng.choice([1, 2])):
        i, letter = rng.randrange(len(key)), rng.choice(string.ascii_lowercase + "_")
        swapped = key[:i] + key[i + 1 : i + 2] + key[i] + key[i + 2 :]
        key = rng.choice(
            [key[:i] + letter + key[i:], key[:i] + key[i + 1 :], key[:i] + letter + key[i + 1 :], swapped]
        )
    return key


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("key", "what"),
    [
        ("sampling.length_penalty", "penalties of length"),
        ("best_of", "beam search"),
        ("sampling.bad-words", "bans of tokens"),
        ("n_gpu_layers", "offloading to the host"),
    ],
)
def test_keys_that_only_other_engines_have_are_said_to_be_theirs(key: str, what: str) -> None:
    """No key that is spelt alike is suggested."""
    expected = f"; other engines have it, and idlm has no {what}"
    assert schemas.unknown_key(SamplingParams, key) == f"unknown key {key!r}{expected}"
    assert did_you_mean(key, ["top_p", "best"]) == expected


def test_misspelt_keys_are_all_refused_and_nearly_all_understood(conf: Path) -> None:
    rng = random.Random(0)
    known = [
        key.replace("*", "0") for key, *_ in schemas.walk(FixtureSchema) if not key.startswith("arguments")
    ]
    is_key = set(known).__contains__
    pairs = [(word, key) for key in known for word in (misspell(key, rng) for _ in range(32))]
    pairs = [
        (word, key) for word, key in pairs if not is_key(word) and schemas.lookup(FixtureSchema, word) is None
    ]
    assert len(pairs) >= 500
    right = sum(schemas.suggest_key(FixtureSchema, word) == key for word, key in pairs)
    assert right / len(pairs) >= 0.95, f"{right} of {len(pairs)}"
    message = refused(conf, "recipe=tiny", *(f"{word}=1" for word, _ in pairs))
    for word, _ in pairs:
        assert f"unknown key {word!r}" in message or f"cannot read '{word}=1'" in message, word
