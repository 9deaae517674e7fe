"""The program that runs a candidate's text inside the sandbox and calls its functions on request, and the
form in which arguments and results travel.

It is given to Python as text (`python -c`), so it imports nothing of ours. Lines of JSON on standard input
and output; the candidate's own output goes nowhere.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import json
import os
import sys
import types
from collections.abc import Iterator
from typing import Any

SEQUENCES: dict[str, Any] = {
    "list": list,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "iterator": iter,
}
OBJECTS: list[Any] = []
"""Objects that are not plain data stay here; the checker holds their numbers and can only give them back."""


class Handle:
    """An object of the candidate as the checker sees it: equal to nothing but itself."""

    def __init__(self, number: int) -> None:
        self.number = number


def pack(value: Any, *, keep: bool = False) -> Any:
    """Plain data as JSON; with `keep`, other objects stay in OBJECTS. TypeError for them otherwise."""
    if value is None or isinstance(value, bool | str):
        return bool(value) if isinstance(value, bool) else value if value is None else str(value)
    if isinstance(value, int):
        return {"int": hex(value)}
    if isinstance(value, float):
        return {"float": float(value).hex()}
    if isinstance(value, complex):
        return {"complex": [value.real.hex(), value.imag.hex()]}
    if isinstance(value, bytes | bytearray):
        return {"bytes": value.hex()}
    if isinstance(value, dict):
        return {"dict": [[pack(key, keep=keep), pack(item, keep=keep)] for key, item in value.items()]}
    for name in ("list", "tuple", "set", "frozenset"):
        if isinstance(value, SEQUENCES[name]):
            return {name: [pack(item, keep=keep) for item in value]}
    if isinstance(value, range):
        return {"range": [hex(value.start), hex(value.stop), hex(value.step)]}
    if isinstance(value, Iterator):
        return {"iterator": [pack(item, keep=keep) for item in value]}
    if isinstance(value, Handle):
        return {"object": value.number}
    if not keep:
        raise TypeError(f"{type(value).__name__} cannot be given to the program")
    OBJECTS.append(value)
    return {"object": len(OBJECTS) - 1}


def unpack(data: Any, objects: list[Any] | None = None) -> Any:
    """Undo `pack`; an object is a Handle where there are no `objects`. RuntimeError for other data."""
    if data is None or isinstance(data, bool | str):
        return data
    try:
        [(kind, held)] = data.items()
        if kind == "int":
            return int(held, 16)
        if kind == "float":
            return float.fromhex(held)
        if kind == "complex":
            return complex(*map(float.fromhex, held))
        if kind == "bytes":
            return bytes.fromhex(held)
        if kind == "dict":
            return {unpack(key, objects): unpack(item, objects) for key, item in held}
        if kind == "range":
            return range(*(int(item, 16) for item in held))
        if kind == "object":
            return Handle(held) if objects is None else objects[held]
        return SEQUENCES[kind](unpack(item, objects) for item in held)
    except (AttributeError, TypeError, ValueError, LookupError) as error:
        raise RuntimeError(f"the program sent something else than data: {error}") from error


class _Text(importlib.abc.InspectLoader):
    """Loads a module from a text."""

    def __init__(self, text: str) -> None:
        self._text = text

    def get_source(self, fullname: str) -> str:
        return self._text


def run_text(name: str, text: str, given: dict[str, Any]) -> types.ModuleType:
    """Run a text as the module `name`, which begins with the names `given`."""
    module, loader = types.ModuleType(name), _Text(text)
    module.__dict__.update(given)
    module.__spec__ = importlib.machinery.ModuleSpec(name, loader)
    sys.modules[name] = module
    loader.exec_module(module)
    return module


def serve() -> None:
    """Run the text of the first line, then the calls of the others."""
    asked, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nowhere = os.open("/dev/null", os.O_RDWR)
    os.dup2(nowhere, 0)
    os.dup2(nowhere, 1)
    module = types.ModuleType("candidate")
    for line in asked:
        message = json.loads(line)
        try:
            if "code" in message:
                module, value = run_text("candidate", message["code"], {}), None
            else:
                args, kwargs = unpack(message["args"], OBJECTS)
                value = getattr(module, message["call"])(*args, **kwargs)
            reply = {"value": pack(value, keep=True)}
        except BaseException as error:
            reply = {"error": f"{type(error).__name__}: {error}"[:2000]}
        answers.write(json.dumps(reply).encode() + b"\n")
        answers.flush()


if __name__ == "__main__":
    serve()
