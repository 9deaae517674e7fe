"""The program that runs a candidate's text inside the sandbox and calls its functions on request, and the
form in which arguments and results travel.

It is given to Python as text (`python -c`), so it imports nothing of ours. Lines of JSON on standard input
and output; the candidate's own output goes nowhere.
"""

from __future__ import annotations

import collections
import collections.abc
import importlib
import importlib.abc
import importlib.machinery
import json
import os
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

MUTABLE: dict[str, type] = {
    "list": list,
    "Counter": collections.Counter,
    "dict": dict,
    "set": set,
    "deque": collections.deque,
    "bytearray": bytearray,
}
FROZEN: dict[str, Any] = {"tuple": tuple, "frozenset": frozenset, "iterator": iter}
VIEWS: dict[str, tuple[Any, Callable[[list[Any]], Any]]] = {
    "keys": (collections.abc.KeysView, lambda items: dict.fromkeys(items).keys()),
    "values": (collections.abc.ValuesView, lambda items: dict(enumerate(items)).values()),
    "items": (collections.abc.ItemsView, lambda items: dict(items).items()),
}
FORMS: dict[str, Callable[[Any], list[Any]]] = {
    "decimal.Decimal": lambda value: [str(value)],
    "fractions.Fraction": lambda value: [value.numerator, value.denominator],
    "datetime.datetime": lambda value: [value.isoformat()],
    "datetime.date": lambda value: [value.isoformat()],
    "datetime.time": lambda value: [value.isoformat()],
    "datetime.timedelta": lambda value: [value.days, value.seconds, value.microseconds],
    "array.array": lambda value: [value.typecode, value.tolist()],
}
"""What other classes of the standard library are made of again: by their constructors, or `fromisoformat`."""


class Handle:
    """An object of the candidate as the checker sees it: equal to nothing but itself."""

    def __init__(self, number: int) -> None:
        self.number = number


class Wire:
    """Values of one call as JSON. Containers that the checker gives are numbered, and both sides know them by
    their number: so the candidate can change and return them. Without `objects` it is the checker's side,
    else the candidate's, where objects that are not plain data stay, and the checker holds their numbers.
    """

    def __init__(self, objects: list[Any] | None = None) -> None:
        self.shared: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._objects = objects

    def give(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments of a call. TypeError for an object that is not plain data."""
        packed = {"args": [self.pack(item) for item in args]}
        named = {name: self.pack(item) for name, item in kwargs.items()}
        # The contents of one may add more.
        contents: list[Any] = []
        while len(contents) < len(self.shared):
            contents.append(self.contents(self.shared[len(contents)]))
        return {**packed, "kwargs": named, "shared": contents}

    def take(self, message: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """The arguments that `give` packed."""
        for form in message["shared"]:
            [kind] = form
            self._share(MUTABLE[kind]())
        for number, form in enumerate(message["shared"]):
            self.refill(number, form)
        named = {name: self.unpack(item) for name, item in message["kwargs"].items()}
        return [self.unpack(item) for item in message["args"]], named

    def refill(self, number: int, form: Any) -> None:
        """Give the container of a number these contents."""
        target, items = self.shared[number], self.unpack(form)
        if not isinstance(target, type(items)):
            raise RuntimeError("the program sent contents of another container")
        if isinstance(target, list | bytearray):
            target[:] = items
        else:
            target.clear()
            extend = target.extend if isinstance(target, collections.deque) else target.update
            extend(items)

    def _share(self, value: Any) -> dict[str, int]:
        number = self._numbers.setdefault(id(value), len(self.shared))
        if number == len(self.shared):
            self.shared.append(value)
        return {"shared": number}

    def pack(self, value: Any) -> Any:
        """Plain data as JSON; on the checker's side TypeError for other objects."""
        if value is None or isinstance(value, bool | str):
            return bool(value) if isinstance(value, bool) else value if value is None else str(value)
        if isinstance(value, int):
            return {"int": hex(value)}
        if isinstance(value, float):
            return {"float": float(value).hex()}
        if isinstance(value, complex):
            return {"complex": [value.real.hex(), value.imag.hex()]}
        if isinstance(value, bytes | memoryview):
            return {"bytes": bytes(value).hex()}
        if isinstance(value, range):
            return {"range": [hex(value.start), hex(value.stop), hex(value.step)]}
        if isinstance(value, tuple(MUTABLE.values())):
            is_known = id(value) in self._numbers
            return self._share(value) if is_known or self._objects is None else self.contents(value)
        return self._pack_frozen(value)

    def _pack_frozen(self, value: Any) -> Any:
        for kind in ("tuple", "frozenset"):
            if isinstance(value, FROZEN[kind]):
                return {kind: [self.pack(item) for item in value]}
        for kind, (view, _) in VIEWS.items():
            if isinstance(value, view):
                return {kind: [self.pack(item) for item in value]}
        if isinstance(value, Iterator):
            return {"iterator": [self.pack(item) for item in value]}
        for base in type(value).__mro__:
            kind = f"{base.__module__}.{base.__qualname__}"
            if kind in FORMS:
                return {kind: [self.pack(item) for item in FORMS[kind](value)]}
        if isinstance(value, Handle):
            return {"object": value.number}
        if self._objects is None:
            raise TypeError(f"{type(value).__name__} cannot be given to the program")
        self._objects.append(value)
        return {"object": len(self._objects) - 1}

    def contents(self, value: Any) -> dict[str, Any]:
        """A container with its items."""
        kind = next(kind for kind, each in MUTABLE.items() if isinstance(value, each))
        if isinstance(value, dict):
            return {kind: [[self.pack(key), self.pack(item)] for key, item in value.items()]}
        return {kind: value.hex() if kind == "bytearray" else [self.pack(item) for item in value]}

    def unpack(self, data: Any) -> Any:
        """Undo `pack`; an object is a Handle on the checker's side. RuntimeError for other data."""
        if data is None or isinstance(data, bool | str):
            return data
        try:
            [(kind, held)] = data.items()
            return self._unpacked(kind, held)
        except (AttributeError, TypeError, ValueError, ArithmeticError, LookupError) as error:
            raise RuntimeError(f"the program sent something else than data: {error}") from error

    def _unpacked(self, kind: str, held: Any) -> Any:
        match kind:
            case "int":
                return int(held, 16)
            case "float":
                return float.fromhex(held)
            case "complex":
                return complex(*map(float.fromhex, held))
            case "bytes" | "bytearray":
                return MUTABLE.get(kind, bytes)(bytes.fromhex(held))
            case "range":
                return range(*(int(item, 16) for item in held))
            case "dict" | "Counter":
                return MUTABLE[kind]({self.unpack(key): self.unpack(item) for key, item in held})
            case "object":
                return Handle(held) if self._objects is None else self._objects[held]
            case "shared":
                return self.shared[held]
        items = [self.unpack(item) for item in held]
        if kind in VIEWS:
            return VIEWS[kind][1](items)
        if kind not in FORMS:
            return (FROZEN | MUTABLE)[kind](items)
        module, _, name = kind.partition(".")
        made = getattr(importlib.import_module(module), name)
        return getattr(made, "fromisoformat", made)(*items)


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
    module, objects = types.ModuleType("candidate"), list[Any]()
    for line in asked:
        message, wire = json.loads(line), Wire(objects)
        before: list[Any] = []
        try:
            if "code" in message:
                module, value = run_text("candidate", message["code"], {}), None
            else:
                args, kwargs = wire.take(message)
                before = [wire.contents(each) for each in wire.shared]
                value = getattr(module, message["call"])(*args, **kwargs)
            reply = {"value": wire.pack(value), "changed": _changed(wire, before)}
        except BaseException as error:
            reply = _raised(wire, error) | {"changed": _changed(wire, before)}
        answers.write(json.dumps(reply).encode() + b"\n")
        answers.flush()


def _changed(wire: Wire, before: list[Any]) -> list[Any]:
    """The containers that a call changed: numbers and contents."""
    after = ((number, wire.contents(wire.shared[number])) for number in range(len(before)))
    return [[number, now] for number, now in after if now != before[number]]


def _raised(wire: Wire, error: BaseException) -> dict[str, Any]:
    """An exception by its text, and by its built-in classes and arguments, so that it can be raised again."""
    kinds = [each.__name__ for each in type(error).__mro__ if each.__module__ == "builtins"]
    try:
        args = [wire.pack(item) for item in error.args]
    except Exception:
        args = []
    return {"error": f"{type(error).__name__}: {error}"[:2000], "kinds": kinds, "args": args}


if __name__ == "__main__":
    serve()
