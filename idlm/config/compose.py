"""The configuration of a command: conf/<name>.yaml, a recipe and `key=value` overrides, as a typed dataclass.

This is the only file that imports hydra and omegaconf. Hydra reads the override grammar, OmegaConf merges
files and resolves interpolations, and the schema decides what is allowed."""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import yaml

from idlm.config import schema as schemas
from idlm.config.schema import FROZEN as FROZEN
from idlm.config.schema import RECIPE as RECIPE
from idlm.config.suggest import did_you_mean
from idlm.errors import UserError

T = TypeVar("T")
CONF_DIR = Path(__file__).parents[1] / "conf"
ASSETS = "recipes/assets/"
SELF = "_self_"
_OVERRIDE = re.compile(r"^(?P<sign>\+\+|\+|~)?(?P<key>[A-Za-z_][\w.\-/@]*)(?:=(?P<value>.*))?$", re.DOTALL)


class Override(NamedTuple):
    """One `key=value` of the command line; `text` is the part after the first equals sign."""

    sign: str
    key: str
    text: str


def compose(config_name: str, schema: type[T], overrides: list[str], *, conf_dir: Path = CONF_DIR) -> T:
    """Return the configuration of one command: `schema` filled from conf/<config_name>.yaml, recipe and
    overrides.

    `recipe=x` and `+recipe=x` name a file of conf/recipe or the path of a YAML file; overrides may come in
    any order and always win over the recipe. `config=FILE` takes a whole composed configuration instead (one
    that a launcher froze, or a run's `config.yaml`), so that all ranks see the same. All unknown keys, wrong
    types and missing values are reported in ONE UserError IDLM-0101; an unknown recipe is IDLM-0104, a file
    that is not YAML IDLM-0105, a wrong interpolation IDLM-0106."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    problems: list[str] = []
    chosen, values = _split(overrides, schema, problems)
    if len(chosen) == 2:
        problems.append(f"{FROZEN}={chosen[FROZEN]} is a whole configuration; {RECIPE} cannot be added")
    frozen = FROZEN in chosen
    file = _file(chosen[FROZEN]) if frozen else conf_dir / f"{config_name}.yaml"
    layers = [_read_yaml(file, kind="configuration")]
    try:
        if chosen.get(RECIPE) and not frozen:
            layers += _recipe_layers(_recipe_path(chosen[RECIPE], conf_dir), conf_dir)
        data = OmegaConf.create(schemas.defaults_of(schema))
        for layer in layers:
            _reset(data, schema, _keys(layer))
            data = OmegaConf.merge(data, layer)
        _reset(data, schema, [one.key for one in values if one.sign != "~" and one.text.strip() != "null"])
        for override in values:
            _apply(data, override, schema, problems)
        resolved: Any = OmegaConf.to_container(data, resolve=True)
    except OmegaConfBaseException as error:
        raise UserError(
            "IDLM-0106", f"an interpolation cannot be resolved: {error}", fix="correct the ${...} expression"
        ) from error
    config: T = schemas.build(schema, resolved, problems)
    if problems:
        listed = "".join(f"\n  - {problem}" for problem in dict.fromkeys(problems))
        raise UserError(
            "IDLM-0101",
            f"the configuration {config_name!r} does not fit:{listed}",
            fix="correct these keys on the command line or in the recipe; --help lists every key",
        )
    return config


def _yaml_content(text: str) -> Any:
    """Return the content of YAML. OmegaConf reads 1e-5 as a number, as users mean it; PyYAML as text."""
    from omegaconf import OmegaConf

    return OmegaConf.to_container(OmegaConf.create(text))


def yaml_text(values: dict[str, Any]) -> str:
    """Return plain data as YAML, which `config=FILE` reads as the same values."""
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(OmegaConf.create(values))


def recipes(conf_dir: Path = CONF_DIR) -> list[str]:
    """Return the names that `recipe=` accepts, sorted."""
    return sorted(path.stem for path in (conf_dir / RECIPE).glob("*.yaml"))


def _split(overrides: list[str], schema: type, problems: list[str]) -> tuple[dict[str, str], list[Override]]:
    """Separate the choices of files (`recipe=x`, `config=FILE`) from the values."""
    files = {key for key in (RECIPE, FROZEN) if schemas.lookup(schema, key) is None}
    chosen: dict[str, str] = {}
    values = []
    for given in overrides:
        match = _OVERRIDE.match(given)
        if match is None or (match["value"] is None and match["sign"] != "~"):
            problems.append(f"cannot read {given!r}; write {_written(given, schema)}")
            continue
        override = Override(*match.groups(default=""))
        if override.key not in files:
            values.append(override)
        elif override.key == RECIPE and RECIPE in chosen:
            problems.append(f"{RECIPE} is given twice: {chosen[RECIPE]!r} and {override.text!r}")
        else:
            chosen[override.key] = _unquote(override.text)
    return chosen, values


def _written(given: str, schema: type) -> str:
    """Return what to write instead of an argument that is not `key=value`, such as `--key`."""
    name = given.partition("=")[0]
    # Path.is_dir raises OSError for a text that is too long for a name, such as a prompt.
    if os.path.isdir(given) and schemas.is_text(schemas.lookup(schema, "model")):
        return f"model={given}"
    if "[" in name:
        return "key=value, and a whole list at once: key='[{...}, {...}]'"
    key = name.removeprefix("--").replace("-", "_") if name.startswith("--") else ""
    match = key if schemas.lookup(schema, key) else schemas.suggest_key(schema, key) if key else None
    return f"{match}=VALUE" if match else "key=value"


def _read_yaml(path: Path, *, kind: str) -> dict[str, Any]:
    """Return the mapping in a file, interpolations as they are. UserError IDLM-0104 (no file), IDLM-0105."""
    if not path.is_file():
        raise UserError("IDLM-0104", f"there is no {kind} file {path}", fix="check the path")
    try:
        text = path.read_text(encoding="utf-8")
        content = _yaml_content(text)
    except (yaml.YAMLError, ValueError) as error:
        raise UserError("IDLM-0105", f"{path} is not YAML: {error}", fix="correct the file") from error
    if not isinstance(content, dict):
        raise UserError("IDLM-0105", f"{path} does not hold a mapping", fix="write key: value lines")
    return content


def _file(given: str) -> Path:
    try:
        return Path(schemas.expand_home(given))
    except ValueError as error:
        raise UserError("IDLM-0104", f"there is no file {given}: {error}", fix="check the path") from error


def _recipe_path(recipe: str, conf_dir: Path) -> Path:
    if "/" in recipe or recipe.endswith((".yaml", ".yml")):
        return _file(recipe)
    if recipe not in (names := recipes(conf_dir)):
        raise UserError(
            "IDLM-0104",
            f"unknown {RECIPE} {recipe!r}{did_you_mean(recipe, names)}",
            fix=f"choose one of: {', '.join(names)}, or give the path of a .yaml file",
        )
    return conf_dir / RECIPE / f"{recipe}.yaml"


def _recipe_layers(path: Path, conf_dir: Path, *above: Path) -> list[dict[str, Any]]:
    """Return the contents to merge: a recipe, and the recipes next to it or bundled that its list `defaults`
    names. Later ones win; the recipe itself stands where the list has `_self_`, else at the end. `above` are
    the recipes that lead here, which none of them may name again."""
    content, known = _read_yaml(path, kind=RECIPE), (path, *above)
    names, layers = content.pop("defaults", None) or [], []
    if not isinstance(names, list):
        raise UserError("IDLM-0105", f"{path}: `defaults` is {names!r}", fix="list names of recipes")
    for name in names if SELF in names else [*names, SELF]:
        if name == SELF:
            layers.append(_located(content, conf_dir))
            continue
        files = [folder / f"{name}.yaml" for folder in (path.parent, conf_dir / RECIPE)]
        found = next((file for file in files if file.is_file() and file not in known), None)
        if found is None:
            raise UserError(
                "IDLM-0105",
                f"{path}: `defaults` names {name!r}, which is not another recipe",
                fix="correct the file",
            )
        layers += _recipe_layers(found, conf_dir, *known)
    return layers


def _located(value: Any, conf_dir: Path) -> Any:
    """Replace paths of bundled assets, which recipes give from the repository's root, by absolute ones."""
    if isinstance(value, dict):
        return {key: _located(below, conf_dir) for key, below in value.items()}
    if isinstance(value, str) and value.startswith(ASSETS) and not Path(value).exists():
        bundled = conf_dir / RECIPE / "assets" / value.removeprefix(ASSETS)
        return str(bundled.resolve()) if bundled.exists() else value
    return value


def _reset(data: Any, schema: type, given: Collection[str]) -> None:
    """Put back in `data` what does not go with the keys that the next layer gives."""
    from omegaconf import OmegaConf

    for key, default in schemas.resets(schema, given).items():
        OmegaConf.update(data, key, default, merge=False, force_add=True)


def _keys(layer: dict[str, Any], prefix: str = "") -> list[str]:
    """Return the dotted keys of the values in `layer` that are not null."""
    found = [f"{prefix}{name}" for name, value in layer.items() if value is not None]
    for name, value in layer.items():
        found += _keys(value, f"{prefix}{name}.") if isinstance(value, dict) else []
    return found


def _apply(data: Any, override: Override, schema: type, problems: list[str]) -> None:
    """Set (or, for `~key`, drop) one value of the OmegaConf mapping `data`."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    sign, key, _ = override
    annotation = schemas.lookup(schema, key)
    if annotation is None:
        problems.append(schemas.unknown_key(schema, key))
        return
    parent, _, last = key.rpartition(".")
    try:
        if sign == "~":
            (OmegaConf.select(data, parent) if parent else data).pop(last, None)
        else:
            OmegaConf.update(data, key, _parse(override, annotation), merge=False, force_add=True)
    except UserError as error:
        problems.append(error.message)
    except (OmegaConfBaseException, AttributeError, IndexError, TypeError):
        problems.append(f"{key} is not there: the list is shorter, or its parent is not a mapping")


def _parse(override: Override, annotation: Any) -> Any:
    """Return the value of an override. Text is taken as typed, so that no path needs quotes."""
    text = override.text
    if not schemas.is_text(annotation):
        return parse_value(override.key, text)
    return None if text.strip() == "null" and schemas.allows_null(annotation) else _unquote(text)


def parse_value(key: str, text: str) -> Any:
    """Return the value of `key=text` in Hydra's override grammar, or of a list or mapping in YAML, whose
    plain text may have more characters, such as those of paths. UserError IDLM-0101 if it has none."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        parsed = OverridesParser.create().parse_override(f"{key}={text}")
    except HydraException as error:
        return _yaml_value(key, text, error)
    if parsed.is_sweep_override():
        raise UserError(
            "IDLM-0101", f"{key}: several values {text!r}; write a list as [a,b]", fix="quote the value"
        )
    return _without_quotes(parsed.value())


def _yaml_value(key: str, text: str, error: Exception) -> Any:
    """Return a list or mapping in YAML; UserError IDLM-0101, from Hydra's `error`, for anything else."""
    hint = "; write a list as [a,b]" if "," in text else ""
    if text.lstrip()[:1] in ("[", "{"):
        try:
            return _yaml_content(text)
        except (yaml.YAMLError, ValueError):
            hint = "; put quotes around text with commas, brackets or #"
    message = f"{key}: cannot read the value {text!r}{hint}"
    raise UserError("IDLM-0101", message, fix="quote the value") from error


def _without_quotes(value: Any) -> Any:
    from hydra.core.override_parser.types import QuotedString

    if isinstance(value, QuotedString):
        return value.text
    if isinstance(value, list):
        return [_without_quotes(item) for item in value]
    if isinstance(value, dict):
        return {str(_without_quotes(key)): _without_quotes(item) for key, item in value.items()}
    return value


def _unquote(text: str) -> str:
    bare = text.strip()
    return bare[1:-1] if len(bare) > 1 and bare[0] == bare[-1] and bare[0] in "'\"" else text
