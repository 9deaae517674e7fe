"""Configuration schemas as dataclasses: their dotted keys, and typed values from plain YAML data.

Supported annotations: dataclass, Optional and other unions, list, tuple of any length, dict, Literal, Any,
int, float, str, bool. Every problem is collected, so that a user corrects a file once. pydantic would not
make this shorter (its errors need translating to keys and words) and doubles the CPU time of `-h` (0.2 s)
when imported."""

from __future__ import annotations

import dataclasses
import os
import sys
import types
import typing
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING
from typing import Any, Literal

from idlm.config.suggest import ALIASES, absent, did_you_mean, nearest
from idlm.errors import UserError

ITEM = "*"
RECIPE, FROZEN = "recipe", "config"
"""Keys that name files with values, where a schema has no key of that name."""
LARGEST_NUMBER = sys.float_info.max
_NAMES = {int: "an integer", float: "a number", str: "text", bool: "true or false", type(None): "null"}
_GIVEN = {int: "integer", float: "number", str: "text", bool: "boolean", list: "list", dict: "mapping"}


def option(text: str, default: Any, *, is_path: bool = False, reset_by: Sequence[str] = ()) -> Any:
    """Return a dataclass field with the help text that the command line shows; a list or dict default is
    copied. In a path, and in those of a list or dict, `~` and `~user` mean a home. `reset_by`: sibling
    fields that, given without this one, put it back to its default: the value of a lower layer was meant for
    other values of them."""
    metadata = {"help": text, "is_path": is_path, "reset_by": tuple(reset_by)}
    if isinstance(default, list | dict):
        return dataclasses.field(default_factory=default.copy, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def expand_home(path: str) -> str:
    """Return the path with a leading `~` or `~user` replaced by that home. ValueError where no such home is
    known, else a mistyped name would become a new folder."""
    expanded = os.path.expanduser(path)
    if expanded == path and path.startswith("~"):
        raise ValueError(f"{path.split('/')[0]} is the home of no known user; write ./{path} for such a name")
    return expanded


def fields_of(schema: type) -> dict[str, tuple[dataclasses.Field[Any], Any]]:
    """Return name -> (field, resolved annotation) of the fields that a user may set."""
    hints = typing.get_type_hints(schema)
    return {field.name: (field, hints[field.name]) for field in dataclasses.fields(schema) if field.init}


def members(annotation: Any) -> tuple[Any, ...]:
    """Return the alternatives of a union; (annotation,) for anything else."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return typing.get_args(annotation)
    return (annotation,)


def is_schema(annotation: Any) -> bool:
    return isinstance(annotation, type) and dataclasses.is_dataclass(annotation)


def lookup(schema: type, key: str) -> Any:
    """Return the annotation of a dotted key (`stages.0.stride`), or None if the schema has no such key."""
    annotation: Any = schema
    for segment in key.split("."):
        annotation = _step(annotation, segment)
        if annotation is None:
            return None
    return annotation


def _step(annotation: Any, segment: str) -> Any:
    for member in members(annotation):
        origin, arguments = typing.get_origin(member), typing.get_args(member)
        if member is Any or member is dict:
            return Any
        if is_schema(member):
            found = fields_of(member).get(segment)
            if found is not None:
                return found[1]
        elif origin is dict:
            return arguments[1]
        elif origin in (list, tuple) and (segment.isdigit() or segment == ITEM):
            return arguments[0]
    return None


def walk(schema: type, prefix: str = "") -> Iterator[tuple[str, Any, dataclasses.Field[Any], Any]]:
    """Yield (dotted key, annotation, field, default) of every key, nested ones too; list items are written
    `*`."""
    for name, (field, annotation) in fields_of(schema).items():
        key = f"{prefix}{name}"
        yield key, annotation, field, _default_of(field)
        for member in members(annotation):
            is_list = typing.get_origin(member) in (list, tuple)
            item = typing.get_args(member)[0] if is_list else member
            if is_schema(item):
                yield from walk(item, f"{key}.{ITEM}." if is_list else f"{key}.")


def resets(schema: type, given: Collection[str]) -> dict[str, Any]:
    """Return the keys that a layer puts back, which gives the dotted keys `given`, with their defaults."""
    found = {}
    for key, _, field, default in walk(schema):
        causes = [f"{key.rpartition('.')[0]}.{name}" for name in field.metadata.get("reset_by", ())]
        is_caused = any(one == cause or one.startswith(f"{cause}.") for cause in causes for one in given)
        if is_caused and key not in given:
            found[key] = plain(default)
    return found


def suggest_key(schema: type, key: str) -> str | None:
    """Return the key that `key` is an alias of, else the most similar one; list indices stay as given."""
    for alias in ALIASES.get(key.rpartition(".")[2].replace("-", "_").lower(), ()):
        if lookup(schema, alias) is not None:
            return alias
    segments = key.split(".")
    pattern = ".".join(ITEM if segment.isdigit() else segment for segment in segments)
    match = nearest(pattern, [RECIPE, FROZEN, *(known for known, *_ in walk(schema))])
    indices = iter([segment for segment in segments if segment.isdigit()])
    return match and ".".join(next(indices, "0") if part == ITEM else part for part in match.split("."))


def unknown_key(schema: type, key: str) -> str:
    lacking = absent(key)
    if lacking is not None:
        return f"unknown key {key!r}{lacking}"
    match = suggest_key(schema, key)
    hint = f"did you mean {match!r}?" if match else f"top-level keys: {', '.join(fields_of(schema))}"
    return f"unknown key {key!r}; {hint}"


def defaults_of(schema: type) -> dict[str, Any]:
    """Return the defaults as plain nested data, without keys that have no default."""
    defaults = {}
    for name, (field, annotation) in fields_of(schema).items():
        value = _default_of(field)
        if value is not MISSING:
            defaults[name] = plain(value)
        elif is_schema(annotation):
            defaults[name] = defaults_of(annotation)
    return defaults


def _default_of(field: dataclasses.Field[Any]) -> Any:
    return field.default_factory() if field.default_factory is not MISSING else field.default


def plain(value: Any) -> Any:
    """Return a value as plain nested data: dataclasses as mappings, tuples as lists."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {name: plain(getattr(value, name)) for name in fields_of(type(value))}
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def changed(values: Any, defaults: Any) -> dict[str, Any]:
    """Return the fields of a dataclass that differ from those of `defaults`, which may have fewer fields."""
    names = (field.name for field in dataclasses.fields(defaults))
    return {name: own for name in names if (own := getattr(values, name)) != getattr(defaults, name)}


def build(
    schema: type, data: dict[str, Any], problems: list[str], prefix: str = "", root: type | None = None
) -> Any:
    """Return an instance of `schema` from plain `data`, or None after appending all that is wrong to
    `problems`."""
    root = root or schema
    fields, values, before = fields_of(schema), {}, len(problems)
    problems += [unknown_key(root, f"{prefix}{name}") for name in data if name not in fields]
    for name, (field, annotation) in fields.items():
        key = f"{prefix}{name}"
        if name in data and data[name] != "???":
            given = _paths(data[name], key, problems) if field.metadata.get("is_path") else data[name]
            values[name] = _convert(given, annotation, key, problems, root)
        elif _default_of(field) is MISSING:
            problems.append(f"{key} is missing: it needs {describe_type(annotation)}")
    if len(problems) > before:
        return None
    try:
        return schema(**values)
    except ValueError as error:
        message = error.message if isinstance(error, UserError) else error
        problems.append(f"{prefix.rstrip('.')}: {message}".lstrip(": "))
    return None


def build_options(
    config: type, given: Mapping[str, Any], problems: list[str], prefix: str, *, others: Iterable[str] = ()
) -> Any:
    """Return the Config of a plug-in from options by name, or None after appending all that is wrong to
    `problems`. `others`: what an unknown name may have been meant for as well."""
    known = [field.name for field in dataclasses.fields(config)]
    unknown = [name for name in given if name not in known]
    problems += [
        f"{prefix}{name} is not one of its options{did_you_mean(name, [*known, *others])} (it takes "
        f"{', '.join(known) or 'none'})"
        for name in unknown
    ]
    return None if unknown else build(config, dict(given), problems, prefix)


def _paths(value: Any, key: str, problems: list[str]) -> Any:
    """Return paths as text without `~`; what is no path stays."""
    if isinstance(value, dict):
        return {name: _paths(one, f"{key}.{name}", problems) for name, one in value.items()}
    if isinstance(value, list):
        return [_paths(one, f"{key}.{idx}", problems) for idx, one in enumerate(value)]
    try:
        return expand_home(os.fspath(value)) if isinstance(value, str | os.PathLike) else value
    except ValueError as error:
        problems.append(f"{key}: {error}")
        return value


def _convert(value: Any, annotation: Any, key: str, problems: list[str], root: type) -> Any:
    """Return `value` in the type `annotation`; None after appending to `problems` if it does not fit."""
    if value is None and allows_null(annotation):
        return None
    for member in members(annotation):
        origin, arguments = typing.get_origin(member), typing.get_args(member)
        if is_schema(member) and isinstance(value, dict):
            return build(member, value, problems, f"{key}.", root)
        if dict in (member, origin) and isinstance(value, dict):
            item = arguments[1] if arguments else Any
            return {name: _convert(one, item, f"{key}.{name}", problems, root) for name, one in value.items()}
        if origin in (list, tuple):
            # One value may stand for a list: `stop=x` means `stop=[x]`.
            is_single = any(_fits(value, one) for one in members(arguments[0]))
            if not isinstance(value, list) and not is_single:
                continue
            items = value if isinstance(value, list) else [value]
            return origin(
                _convert(item, arguments[0], f"{key}.{idx}", problems, root) for idx, item in enumerate(items)
            )
        if _fits(value, member):
            return float(value) if member is float else value
    problems.append(_misfit(value, annotation, key))
    return None


def _misfit(value: Any, annotation: Any, key: str) -> str:
    given = "null" if value is None else f"{value!r} ({_GIVEN.get(type(value), type(value).__name__)})"
    has_path = any(is_schema(member) and "path" in fields_of(member) for member in members(annotation))
    is_mapping = any(dict in (member, typing.get_origin(member)) for member in members(annotation))
    hint = f"; did you mean {key}.path={value}?" if has_path and isinstance(value, str) else ""
    hint = f"; write {key}.NAME={value}" if is_mapping and isinstance(value, str) else hint
    literals = [typing.get_args(one) for one in members(annotation) if typing.get_origin(one) is Literal]
    hint = did_you_mean(value, map(str, sum(literals, ()))) if literals else hint
    return f"{key}: got {given}, expected {describe_type(annotation)}{hint}"


def _fits(value: Any, annotation: Any) -> bool:
    if annotation is Any:
        return True
    if typing.get_origin(annotation) is Literal:
        return any(value == choice and type(value) is type(choice) for choice in typing.get_args(annotation))
    # A whole number is a number too.
    return type(value) is annotation or (annotation, type(value)) == (float, int)


def describe_type(annotation: Any) -> str:
    """Describe an annotation to a user: `an integer or null`, `one of: auto, never`."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if len(members(annotation)) > 1:
        return " or ".join(describe_type(member) for member in members(annotation))
    if origin is Literal:
        return f"one of: {', '.join(map(str, arguments))}"
    if origin in (list, tuple):
        return f"a list of {describe_type(arguments[0]).removeprefix('an ').removeprefix('a ')} items"
    if is_schema(annotation):
        return f"a mapping with keys {', '.join(fields_of(annotation))}"
    if origin is dict or annotation is dict:
        return "a mapping"
    return _NAMES.get(annotation, "any value")


def is_text(annotation: Any) -> bool:
    """Return whether only text or null fits, so that a value needs no parsing."""
    return set(members(annotation)) - {type(None)} == {str}


def allows_null(annotation: Any) -> bool:
    return annotation is Any or type(None) in members(annotation)


def is_number(value: object, minimum: float = -LARGEST_NUMBER, maximum: float = LARGEST_NUMBER) -> bool:
    """Whether `value` is an int or float, not a bool, in [minimum, maximum]; the default is all of fp64."""
    return isinstance(value, int | float) and not isinstance(value, bool) and minimum <= value <= maximum


def is_integer(value: object, minimum: int, maximum: float = LARGEST_NUMBER) -> bool:
    """As `is_number`, of integers."""
    return isinstance(value, int) and is_number(value, minimum, maximum)
