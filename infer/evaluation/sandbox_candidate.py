"""The program that runs a candidate's text inside the sandbox and calls its functions on request, and the
form in which arguments and results travel: lines of JSON. Its iterators stay there: the checker requests each
item. It is given to Python as text (`python -c`), so it imports nothing of ours."""

from __future__ import annotations

import collections
import collections.abc
import importlib.abc
import importlib.machinery
import json
import os
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

MUTABLE: dict[str, type] = {
    "list": list,
    "Counter": collections.Counter,
    "OrderedDict": collections.OrderedDict,
    "dict": dict,
    "set": set,
    "deque": collections.deque,
    "bytearray": bytearray,
}
FROZEN: dict[str, tuple[Any, Callable[[list[Any]], Any]]] = {
    "tuple": (tuple, tuple),
    "frozenset": (frozenset, frozenset),
    "keys": (collections.abc.KeysView, lambda items: dict.fromkeys(items).keys()),
    "values": (collections.abc.ValuesView, lambda items: dict(enumerate(items)).values()),
    "items": (collections.abc.ItemsView, lambda items: dict(items).items()),
    "iter": (Iterator, iter),
}
FORMS: dict[str, Callable[[Any], list[Any]]] = {
    "builtins.complex": lambda value: [value.real, value.imag],
    "builtins.range": lambda value: [value.start, value.stop, value.step],
    "decimal.Decimal": lambda value: [str(value)],
    "fractions.Fraction": lambda value: [value.numerator, value.denominator],
    **dict.fromkeys(
        ("datetime.datetime", "datetime.date", "datetime.time"), lambda value: [value.isoformat()]
    ),
    "datetime.timedelta": lambda value: [value.days, value.seconds, value.microseconds],
    "array.array": lambda value: [value.typecode, value.tolist()],
}
"""What other classes are made of again: by their constructors, or `fromisoformat`."""
ACCESS = {"Handle.get": getattr, "Handle.set": setattr}
"""How attributes of objects are read and set, by names that no function of the candidate has."""

Message = dict[str, Any]


class Handle:
    """An object of the candidate as the checker sees it: equal to nothing but itself. Its public attributes
    are those of the object."""

    def __init__(self, number: int, wire: Wire) -> None:
        vars(self).update(_number=number, _wire=wire)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return self._wire.call("Handle.get", (self, name), {})

    def __setattr__(self, name: str, value: Any) -> None:
        self._wire.call("Handle.set", (self, name, value), {})


class Items(Handle):
    """An iterator of the candidate."""

    def __iter__(self) -> Items:
        return self

    def __next__(self) -> Any:
        return self._wire.result(self._wire.exchange({"next": self._number}))


class Lost(BaseException):
    """There is no answer of the candidate; not an Exception, which a test might catch."""


class Wire:
    """Values as JSON. The checker's side has `exchange`, which sends a message and returns the reply; that of
    the candidate stores iterators, and objects that are not plain data."""

    def __init__(self, exchange: Callable[[Message], Message] | None = None) -> None:
        self.exchange: Any = exchange
        self.objects: list[Any] = []
        self._numbers: dict[int, int] = {}

    def call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of a function of the candidate or of ACCESS, which may change its arguments. Raises what
        it raises, TypeError for an argument that is not plain data."""
        named = {key: self.pack(item) for key, item in kwargs.items()}
        reply = self.exchange({"call": name, "args": [self.pack(item) for item in args], "kwargs": named})
        for number, now in reply.get("changed", ()):
            refill([*args, *kwargs.values()][number], self.unpack(now))
        return self.result(reply)

    def result(self, reply: Message) -> Any:
        """The value of a reply. Raises the exception that it holds as the nearest class of Python or of what
        the test has imported from its library, with its own words as a note; Lost for an exit."""
        if "error" not in reply:
            return self.unpack(reply.get("value"))
        found = [_library_class(str(name)) for name in reply["kinds"]]
        kinds = [each for each in found if isinstance(each, type) and issubclass(each, Exception)]
        failure = str(reply["error"])[:2000]
        if not kinds:
            raise Lost(failure)
        try:
            args = [self.unpack(each) for each in reply["args"]]
        except (TypeError, RuntimeError):
            kinds, args = kinds[-1:], [failure]
        error = _made(kinds, args)
        error.add_note(failure)
        raise error

    def answer(self, message: Message) -> Message:
        """On the candidate's side, the reply to a call: its result, and the arguments that it changed."""
        given = [*message["args"], *message["kwargs"].values()]
        values = [self.unpack(item) for item in given]
        num = len(message["args"])
        named = dict(zip(message["kwargs"], values[num:], strict=True))
        module, name = sys.modules["candidate"], message["call"]
        reply = self.attempt(lambda: (ACCESS.get(name) or getattr(module, name))(*values[:num], **named))
        after = enumerate(map(self.pack, values))
        return reply | {"changed": [[number, now] for number, now in after if now != given[number]]}

    def attempt(self, work: Callable[..., Any], *args: Any) -> Message:
        """What `work` returns, or the exception that it raises: its text, its classes and arguments, so that
        it can be raised again."""
        try:
            return {"value": self.pack(work(*args))}
        except BaseException as error:
            kinds = [f"{each.__module__}:{each.__qualname__}" for each in type(error).__mro__]
            failure: Message = {
                "error": f"{type(error).__name__}: {error}"[:2000],
                "kinds": kinds,
                "args": [],
            }
            with suppress(Exception):
                failure["args"] = [self.pack(item) for item in error.args]
            return failure

    def pack(self, value: Any) -> Any:
        """Plain data as JSON; on the checker's side TypeError for other objects."""
        if value is None or isinstance(value, bool | str):
            # An enumeration of texts would write its own name.
            return str.__str__(value) if isinstance(value, str) else value
        if isinstance(value, int):
            return {"int": hex(value)}
        if isinstance(value, float):
            return {"float": float(value).hex()}
        if isinstance(value, bytes | memoryview):
            return {"bytes": bytes(value).hex()}
        if isinstance(value, tuple(MUTABLE.values())):
            return self._contents(value)
        return self._pack_frozen(value)

    def _pack_frozen(self, value: Any) -> Any:
        if isinstance(value, Handle):
            return {"object": value._number}
        if isinstance(value, Iterator) and self.exchange is None:
            return self._stored("iterator", value)
        for kind, (each, _) in FROZEN.items():
            if isinstance(value, each):
                return {kind: [self.pack(item) for item in value]}
        for base in type(value).__mro__:
            kind = f"{base.__module__}.{base.__qualname__}"
            if kind in FORMS:
                return {kind: [self.pack(item) for item in FORMS[kind](value)]}
        if isinstance(value, collections.abc.Mapping | collections.UserList):
            return self.pack((dict if isinstance(value, collections.abc.Mapping) else list)(value))
        if self.exchange is not None:
            raise TypeError(f"{type(value).__name__} cannot be given to the program")
        return self._stored("object", value)

    def _stored(self, kind: str, value: Any) -> Message:
        number = self._numbers.setdefault(id(value), len(self.objects))
        if number == len(self.objects):
            self.objects.append(value)
        return {kind: number}

    def _contents(self, value: Any) -> Message:
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
            case "bytes" | "bytearray":
                return MUTABLE.get(kind, bytes)(bytes.fromhex(held))
            case "dict" | "Counter" | "OrderedDict":
                return MUTABLE[kind]({self.unpack(key): self.unpack(item) for key, item in held})
            case "object":
                return self.objects[held] if self.exchange is None else Handle(held, self)
            case "iterator":
                return Items(held, self)
        items = [self.unpack(item) for item in held]
        if kind not in FORMS:
            return (FROZEN[kind][1] if kind in FROZEN else MUTABLE[kind])(items)
        module, _, name = kind.partition(".")
        made = getattr(importlib.import_module(module), name)
        return getattr(made, "fromisoformat", made)(*items)


def refill(old: Any, new: Any) -> None:
    """Give a container, or those in a tuple, the contents of its changed copy."""
    if isinstance(old, tuple) and isinstance(new, tuple):
        for each, copy in zip(old, new, strict=False):
            refill(each, copy)
    elif isinstance(old, list | bytearray) and isinstance(old, type(new)):
        old[:] = new
    elif isinstance(old, dict | set | collections.deque) and isinstance(old, type(new)):
        old.clear()
        (old.extend if isinstance(old, collections.deque) else old.update)(new)


def _made(kinds: list[type[Exception]], args: list[Any]) -> Exception:
    """An exception of the first kind that can be made of `args` and has words. No constructor of the library
    is called: it may take other arguments than the exception stores."""
    for kind in kinds:
        try:
            error = kind(*args) if kind.__module__ == "builtins" else kind.__new__(kind, *args)
            str(error)
        except Exception:
            continue
        return error
    return Exception(*args)


def _library_class(name: str) -> Any:
    """A class of Python or of a module of its library that is imported; None for any other."""
    module, _, own = name.partition(":")
    is_known = module.partition(".")[0] in sys.stdlib_module_names
    return getattr(sys.modules.get(module), own, None) if is_known else None


class _Text(importlib.abc.InspectLoader):
    def __init__(self, text: str) -> None:
        self._text = text

    def get_source(self, fullname: str) -> str:
        return self._text


def run_text(name: str, text: str, given: dict[str, Any]) -> types.ModuleType:
    module, loader = types.ModuleType(name), _Text(text)
    module.__dict__.update(given)
    module.__spec__ = importlib.machinery.ModuleSpec(name, loader)
    sys.modules[name] = module
    loader.exec_module(module)
    return module


def serve() -> None:
    """Run the text of the first line, then the calls of the others."""
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nowhere = os.open("/dev/null", os.O_RDWR)
    os.dup2(nowhere, 0)
    os.dup2(nowhere, 1)
    wire = Wire()
    while message := json.loads(requests.readline() or "{}"):
        if "code" in message:
            reply = wire.attempt(run_text, "candidate", message["code"], {})
        elif "next" in message:
            reply = wire.attempt(next, wire.objects[message["next"]])
        else:
            reply = wire.answer(message)
        answers.write(json.dumps(reply).encode() + b"\n")
        answers.flush()
    os._exit(0)


if __name__ == "__main__":
    serve()
