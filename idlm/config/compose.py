"""Hydra composition (conf/<name>.yaml, then a recipe, then overrides) into a plain, typed dataclass.

The only file that imports hydra and omegaconf. Hydra merges files and reads the override grammar; the schema
decides what is allowed, because Hydra alone turns `+recipe=typo` and `+typo=1` into plain keys and runs the
default.
"""

from __future__ import annotations

import itertools
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import yaml

from idlm.config import schema as schemas
from idlm.config.suggest import did_you_mean
from idlm.errors import UserError

T = TypeVar("T")
CONF_DIR = Path(__file__).parents[1] / "conf"
RECIPE = "recipe"
ASSETS = "recipes/assets/"
FROZEN = "config"
_OVERRIDE = re.compile(r"^(?P<sign>\+\+|\+|~)?(?P<key>[A-Za-z_][\w.\-/@]*)(?:=(?P<value>.*))?$", re.DOTALL)


class Override(NamedTuple):
    """One `key=value` of the command line; `text` is the part after the first equals sign."""

    sign: str
    key: str
    text: str | None


def compose(config_name: str, schema: type[T], overrides: list[str], *, conf_dir: Path = CONF_DIR) -> T:
    """The configuration of one command: `schema` filled from conf/<config_name>.yaml, recipe and overrides.

    `recipe=x` and `+recipe=x` name a file of conf/recipe or the path of a YAML file; overrides may come in
    any order and always win over the recipe. `config=FILE` takes a whole composed configuration instead (what
    a launcher froze, or a run's `config.yaml`), so that all ranks see the same. All unknown keys, wrong types
    and missing values are reported in ONE UserError IDLM-0101; an unknown recipe is IDLM-0104, a file that is
    not YAML IDLM-0105.
    """
    problems: list[str] = []
    frozen, overrides = _take_frozen(overrides, schema)
    groups, values = _split(overrides, schema, conf_dir, problems)
    if frozen is not None and groups:
        problems.append(f"{FROZEN}={frozen} is a whole configuration; {', '.join(groups)} cannot be added")
    given = _read_frozen(frozen) if frozen is not None else _read_files(config_name, groups, conf_dir)
    data = _merge(schemas.defaults_of(schema), given)
    for override in values:
        _apply(data, override, schema, problems)
    config = schemas.build(schema, _resolve(data), problems)
    if problems:
        listed = "".join(f"\n  - {problem}" for problem in dict.fromkeys(problems))
        raise UserError(
            "IDLM-0101",
            f"the configuration {config_name!r} does not fit:{listed}",
            fix="correct these keys on the command line or in the recipe; --help lists every key",
        )
    return config


def describe(schema: type, *, keys: Sequence[str] = ()) -> str:
    """Every key of `schema`, or only `keys`, with its type, default and help text."""
    if keys:
        told = dict(_described(schema))
        return "\n".join(told[key] for key in keys)
    return "\n".join(lines for _, lines in _described(schema))


def _described(schema: type) -> Iterator[tuple[str, str]]:
    """Each key and the lines about it; sections only where they have a text of their own."""
    for key, annotation, field, default in schemas.walk(schema):
        is_section = not schemas.is_leaf(annotation)
        if is_section and not field.metadata.get("help"):
            continue
        shown = "" if is_section else f" = {schemas.show_default(default)}"
        yield key, f"{key}{shown}\n    {field.metadata.get('help', '')} [{schemas.describe_type(annotation)}]"


def recipes(conf_dir: Path = CONF_DIR) -> list[str]:
    """Names that `recipe=` accepts, sorted."""
    return sorted(path.stem for path in (conf_dir / RECIPE).glob("*.yaml"))


def _take_frozen(overrides: list[str], schema: type) -> tuple[Path | None, list[str]]:
    """The file of `config=FILE` and the other overrides; the last one given counts."""
    if schemas.lookup(schema, FROZEN) is not None:
        return None, overrides
    files = [text for text in overrides if text.startswith(f"{FROZEN}=")]
    rest = [text for text in overrides if text not in files]
    path = Path(_unquote(files[-1].partition("=")[2])).expanduser() if files else None
    return path, rest


def _read_frozen(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise UserError("IDLM-0104", f"there is no configuration file {path}", fix="check the path")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError("IDLM-0105", f"{path} is not YAML: {error}", fix="correct the file") from error
    if not isinstance(content, dict):
        raise UserError("IDLM-0105", f"{path} holds no mapping", fix="give the file that a launcher froze")
    return {str(key): value for key, value in content.items()}


def _split(
    overrides: list[str], schema: type, conf_dir: Path, problems: list[str]
) -> tuple[dict[str, str], list[Override]]:
    """Separate choices of files (`recipe=x`) from values."""
    groups: dict[str, str] = {}
    values = []
    for given in overrides:
        match = _OVERRIDE.match(given)
        if match is None or (match["value"] is None and match["sign"] != "~"):
            problems.append(f"cannot read {given!r}; write {_written(given, schema)}")
            continue
        override = Override(match["sign"] or "", match["key"], match["value"])
        annotation = schemas.lookup(schema, override.key)
        is_group = override.key == RECIPE or (conf_dir / override.key).is_dir()
        if not is_group or (annotation is not None and schemas.is_leaf(annotation)):
            values.append(override)
        elif override.key in groups:
            problems.append(f"{override.key} is given twice: {groups[override.key]!r} and {override.text!r}")
        else:
            groups[override.key] = _unquote(override.text or "")
    return groups, values


def _written(given: str, schema: type) -> str:
    """What to write in place of an argument that is not `key=value`, such as another program's `--key`."""
    name = given.partition("=")[0]
    if "[" in name:
        return "key=value, and a whole list at once: key='[{...}, {...}]'"
    key = name.removeprefix("--").replace("-", "_") if name.startswith("--") else ""
    match = key if schemas.lookup(schema, key) else schemas.suggest_key(schema, key) if key else None
    return f"{match}=VALUE" if match else "key=value"


def _read_files(config_name: str, groups: dict[str, str], conf_dir: Path) -> dict[str, Any]:
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    assert (conf_dir / f"{config_name}.yaml").is_file(), f"{conf_dir=} has no {config_name=}"
    fix = "correct the file; recipes start with `# @package _global_`"
    with _user_recipe(groups, conf_dir) as (choices, search_path):
        previous = GlobalHydra.instance().hydra
        GlobalHydra.instance().clear()
        try:
            with initialize_config_dir(str(conf_dir.absolute()), version_base="1.3"):
                composed = hydra_compose(config_name, overrides=[*choices, *search_path])
            container = OmegaConf.to_container(composed, resolve=False)
        except yaml.YAMLError as error:
            raise UserError("IDLM-0105", f"a configuration file is not YAML: {error}", fix=fix) from error
        except (HydraException, OmegaConfBaseException) as error:
            raise UserError("IDLM-0105", f"the configuration cannot be composed: {error}", fix=fix) from error
        finally:
            GlobalHydra.instance().hydra = previous
    assert isinstance(container, dict), f"{config_name=} must be a mapping"
    return {str(key): _located(value, conf_dir) for key, value in container.items()}


def _located(value: Any, conf_dir: Path) -> Any:
    """`value` with the bundled assets, which recipes name from the repository's root, found from anywhere."""
    if isinstance(value, dict):
        return {key: _located(below, conf_dir) for key, below in value.items()}
    if isinstance(value, str) and value.startswith(ASSETS) and not Path(value).exists():
        bundled = conf_dir / RECIPE / "assets" / value.removeprefix(ASSETS)
        return str(bundled.resolve()) if bundled.exists() else value
    return value


@contextmanager
def _user_recipe(groups: dict[str, str], conf_dir: Path) -> Iterator[tuple[list[str], list[str]]]:
    """Group choices as Hydra overrides; a recipe given by path is put where Hydra looks for it."""
    choices = [
        f"+{key}={_known(key, name, conf_dir)}" for key, name in groups.items() if not _is_path(key, name)
    ]
    given = groups.get(RECIPE, "")
    if not _is_path(RECIPE, given):
        yield choices, []
        return
    path = Path(given).expanduser()
    if not path.is_file():
        raise UserError("IDLM-0104", f"there is no recipe file {path}", fix="check the path")
    try:
        text = path.read_text(encoding="utf-8")
        yaml.safe_load(text)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError("IDLM-0105", f"{path} is not YAML: {error}", fix="correct the file") from error
    with tempfile.TemporaryDirectory(prefix="idlm-recipe-") as directory:
        folder = Path(directory) / RECIPE
        folder.mkdir()
        for sibling in path.parent.glob("*.yaml"):
            shutil.copy(sibling, folder)
        # Without this header Hydra would file the content under a key `recipe`.
        header = "" if "@package" in text.partition("\n")[0] else "# @package _global_\n"
        (folder / "given_by_path.yaml").write_text(header + text, encoding="utf-8")
        yield [*choices, f"+{RECIPE}=given_by_path"], [f"hydra.searchpath=[file://{directory}]"]


def _is_path(key: str, name: str) -> bool:
    return key == RECIPE and (name.endswith((".yaml", ".yml")) or "/" in name)


def _known(key: str, name: str, conf_dir: Path) -> str:
    names = sorted(path.stem for path in (conf_dir / key).glob("*.yaml"))
    if name not in names:
        raise UserError(
            "IDLM-0104",
            f"unknown {key} {name!r}{did_you_mean(name, names)}",
            fix=f"choose one of: {', '.join(names) or '(there are none)'}, or give the path of a .yaml file",
        )
    return name


def _apply(data: dict[str, Any], override: Override, schema: type, problems: list[str]) -> None:
    """Set (or, for `~key`, drop) one value in the nested `data`."""
    annotation = schemas.lookup(schema, override.key)
    if annotation is None:
        problems.append(schemas.unknown_key(schema, override.key))
        return
    segments = override.key.split(".")
    last = segments[-1]
    place: Any = data
    for parent, following in itertools.pairwise(segments):
        if isinstance(place, dict):
            if place.get(parent) is None:
                place[parent] = [] if following.isdigit() else {}
            place = place[parent]
        elif isinstance(place, list) and parent.isdigit() and int(parent) < len(place):
            place = place[int(parent)]
        else:
            place = None
            break
    is_item = isinstance(place, list) and last.isdigit() and int(last) < len(place)
    if not (isinstance(place, dict) or is_item):
        problems.append(f"{override.key} is not there: the list is shorter, or what holds it is no mapping")
    elif override.sign == "~" and isinstance(place, dict):
        place.pop(last, None)
    else:
        try:
            place[int(last) if is_item else last] = _parse(override, annotation)
        except UserError as error:
            problems.append(error.message)


def _parse(override: Override, annotation: Any) -> Any:
    """The value of an override. Keys of text and paths take it as typed, so that no path needs quotes."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    text = override.text or ""
    if schemas.is_text(annotation):
        bare = text.strip()
        return None if bare == "null" and schemas.allows_null(annotation) else _unquote(text)
    try:
        parsed = OverridesParser.create().parse_override(f"{override.key}={text}")
        if parsed.is_sweep_override():
            raise UserError("IDLM-0101", f"{override.key}: several values {text!r}", fix="write a list")
        return _without_quotes(parsed.value())
    except HydraException as error:
        hint = "; write a list as [a,b]" if "," in text else ""
        raise UserError(
            "IDLM-0101", f"{override.key}: cannot read the value {text!r}{hint}", fix=""
        ) from error


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


def _merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        below = merged.get(key)
        merged[key] = _merge(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return merged


def _resolve(data: dict[str, Any]) -> dict[str, Any]:
    """Interpolations (`${model.path}`) replaced by what they point to, after all overrides."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        resolved = OmegaConf.to_container(OmegaConf.create(data), resolve=True)
    except OmegaConfBaseException as error:
        raise UserError(
            "IDLM-0106", f"an interpolation cannot be resolved: {error}", fix="correct the ${...} expression"
        ) from error
    assert isinstance(resolved, dict), f"{type(resolved)=}"
    return {str(key): value for key, value in resolved.items()}
