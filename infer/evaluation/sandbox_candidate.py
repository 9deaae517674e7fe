"""The program that runs a candidate's text inside the sandbox and calls its functions on request, and the
form in which arguments and results travel: lines of JSON. Iterators stay where they are: the other side
requests each item. It is given to Python as text (`python -c`), so it imports nothing of ours."""

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
FROZEN: dict[str, Any] = {"tuple": tuple, "frozenset": frozenset}
VIEWS: dict[str, tuple[Any, Callable[[list[Any]], Any]]] = {
    "keys": (collections.abc.KeysView, lambda items: dict.fromkeys(items).keys()),
    "values": (collections.abc.ValuesView, lambda items: dict(enumerate(items)).values()),
    "items": (collections.abc.ItemsView, lambda items: dict(items).items()),
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

Message = dict[str, Any]
Send = Callable[[Message], Any]


class Handle:
    """An object of the candidate as the checker sees it: equal to nothing but itself."""

    def __init__(self, number: int) -> None:
        self.number = number


class Lost(BaseException):
    """There is no answer of the candidate; not an Exception, which a test might catch."""


class Peer:
    """One side of the pipe: it sends requests to the other side, and answers meanwhile. `iterators`: those of
    this side that the other one holds, each with the wire of its call."""

    def __init__(self, send: Send, receive: Callable[[], Message], serve: Send | None = None) -> None:
        self.send, self._receive, self._serve = send, receive, serve
        self.iterators: list[tuple[Iterator[Any], Wire]] = []
        self._known: dict[int, int] = {}
        self._proxies: dict[int, Iterator[Any]] = {}
        self._numbers: dict[int, int] = {}

    def exchange(self, message: Message) -> Message:
        """The reply to a message. RuntimeError if the other side requests what it was not given."""
        self.send(message)
        while True:
            reply = self._receive()
            if "next" in reply:
                self.send(self.next_item(reply["next"]))
            elif self._serve is not None and ("call" in reply or "code" in reply):
                self.send(self._serve(reply))
            else:
                return reply

    def next_item(self, number: Any) -> Message:
        if not isinstance(number, int) or not 0 <= number < len(self.iterators):
            raise RuntimeError("the program requested something else than an item")
        iterator, wire = self.iterators[number]
        try:
            return wire.reply(next(iterator))
        except StopIteration:
            return {"end": True} | wire.reply(None)
        except Exception as error:
            return wire.raised(error)

    def pack(self, iterator: Iterator[Any], wire: Wire) -> dict[str, int]:
        if id(iterator) in self._numbers:
            return {"own": self._numbers[id(iterator)]}
        number = self._known.setdefault(id(iterator), len(self.iterators))
        if number == len(self.iterators):
            self.iterators.append((iterator, wire))
        return {"iterator": number}

    def unpack(self, number: int, wire: Wire) -> Iterator[Any]:
        made = self._proxies.setdefault(number, self._items(number, wire))
        self._numbers[id(made)] = number
        return made

    def _items(self, number: int, wire: Wire) -> Iterator[Any]:
        while "end" not in (reply := self.exchange({"next": number})):
            yield wire.result(reply)
        wire.take_changes(reply)


class Wire:
    """Values of one call as JSON. Containers of the checker have numbers on both sides: so the
    candidate can change and return them. With `objects` it is the candidate's side, where objects stay that
    are not plain data."""

    def __init__(self, peer: Peer, objects: list[Any] | None = None) -> None:
        self.shared: list[Any] = []
        self._before: list[Any] = []
        """Their state on the other side: contents on the candidate's side, None on the checker's."""
        self._numbers: dict[int, int] = {}
        self._peer, self._objects = peer, objects

    def give(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Message:
        """The arguments of a call. TypeError for an object that is not plain data."""
        named = {name: self.pack(item) for name, item in kwargs.items()}
        return {"args": [self.pack(item) for item in args], "kwargs": named, "shared": self._new()}

    def take(self, message: Message) -> tuple[list[Any], dict[str, Any]]:
        self._take_new(message)
        named = {name: self.unpack(item) for name, item in message["kwargs"].items()}
        return [self.unpack(item) for item in message["args"]], named

    def reply(self, value: Any) -> Message:
        """A result, and what became of the containers."""
        packed = self.pack(value)
        return {"value": packed, "shared": self._new(), "changed": self.changes()}

    def raised(self, error: BaseException) -> Message:
        """An exception: its text, its classes and arguments, so that it can be raised again."""
        kinds = [f"{each.__module__}:{each.__qualname__}" for each in type(error).__mro__]
        try:
            args = [self.pack(item) for item in error.args]
        except Exception:
            args = []
        failure = {"error": f"{type(error).__name__}: {error}"[:2000], "kinds": kinds, "args": args}
        return self.reply(None) | failure

    def result(self, reply: Message) -> Any:
        """The value of a reply. Raises the exception that it holds as the nearest class of Python or of what
        the test has imported from its library, with its own words as a note; Lost for an exit."""
        self.take_changes(reply)
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

    def take_changes(self, reply: Message) -> None:
        self._take_new(reply)
        for number, contents in reply.get("changed", ()):
            self.refill(number, contents)

    def changes(self) -> list[Any]:
        """On the candidate's side, the containers that have changed: numbers and contents."""
        if self._objects is None:
            return []
        before, self._before = self._before, [self.contents(each) for each in self.shared]
        return [[number, now] for number, now in enumerate(self._before) if now != before[number]]

    def _new(self) -> list[Any]:
        """The contents of containers that the other side does not have; those of one may add more."""
        start, contents = len(self._before), list[Any]()
        while self._objects is None and start + len(contents) < len(self.shared):
            contents.append(self.contents(self.shared[start + len(contents)]))
        self._before += [None] * len(contents)
        return contents

    def _take_new(self, message: Message) -> None:
        start = len(self.shared)
        forms = message["shared"] if self._objects is not None else []
        for [kind] in forms:
            self._share(MUTABLE[kind]())
        for number, form in enumerate(forms, start):
            self.refill(number, form)
        self._before += [self.contents(each) for each in self.shared[start:]] if forms else []

    def refill(self, number: int, form: Any) -> None:
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
            # An enumeration of texts would write its own name.
            return str.__str__(value) if isinstance(value, str) else value
        if isinstance(value, int):
            return {"int": hex(value)}
        if isinstance(value, float):
            return {"float": float(value).hex()}
        if isinstance(value, bytes | memoryview):
            return {"bytes": bytes(value).hex()}
        if isinstance(value, tuple(MUTABLE.values())):
            is_shared = id(value) in self._numbers or self._objects is None
            return (self._share if is_shared else self.contents)(value)
        return self._pack_frozen(value)

    def _pack_frozen(self, value: Any) -> Any:
        for kind, each in (FROZEN | {kind: view for kind, (view, _) in VIEWS.items()}).items():
            if isinstance(value, each):
                return {kind: [self.pack(item) for item in value]}
        if isinstance(value, Iterator):
            return self._peer.pack(value, self)
        for base in type(value).__mro__:
            kind = f"{base.__module__}.{base.__qualname__}"
            if kind in FORMS:
                return {kind: [self.pack(item) for item in FORMS[kind](value)]}
        if isinstance(value, Handle):
            return {"object": value.number}
        if isinstance(value, collections.abc.Mapping | collections.UserList):
            return self.pack((dict if isinstance(value, collections.abc.Mapping) else list)(value))
        if self._objects is None:
            raise TypeError(f"{type(value).__name__} cannot be given to the program")
        self._objects.append(value)
        return {"object": len(self._objects) - 1}

    def contents(self, value: Any) -> Message:
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
                return Handle(held) if self._objects is None else self._objects[held]
            case "shared":
                return self.shared[held]
            case "iterator":
                return self._peer.unpack(held, self)
            case "own":
                return self._peer.iterators[held][0]
        items = [self.unpack(item) for item in held]
        if kind in VIEWS:
            return VIEWS[kind][1](items)
        if kind not in FORMS:
            return (FROZEN | MUTABLE)[kind](items)
        module, _, name = kind.partition(".")
        made = getattr(importlib.import_module(module), name)
        return getattr(made, "fromisoformat", made)(*items)


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
    module, objects = types.ModuleType("candidate"), list[Any]()

    def send(message: Message) -> None:
        answers.write(json.dumps(message).encode() + b"\n")
        answers.flush()

    def receive() -> Message:
        message: Message = json.loads(requests.readline() or os._exit(0))
        return message

    def answer(message: Message) -> Message:
        nonlocal module
        wire = Wire(peer, objects)
        try:
            if "code" in message:
                module = run_text("candidate", message["code"], {})
                return wire.reply(None)
            args, kwargs = wire.take(message)
            return wire.reply(getattr(module, message["call"])(*args, **kwargs))
        except BaseException as error:
            return wire.raised(error)

    peer = Peer(send, receive, serve=answer)
    while True:
        message = receive()
        send(peer.next_item(message["next"]) if "next" in message else answer(message))


if __name__ == "__main__":
    serve()
