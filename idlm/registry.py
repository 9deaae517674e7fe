"""Plug-in registries: one new file in a package adds a task, decoder, accelerator or objective.

A registry imports every module of its package on the first look-up, so there is no list of members. Other
packages add members through the entry-point group `idlm.<kind>s`. Names from a checkpoint are never looked up
here."""

from __future__ import annotations

import importlib
import importlib.metadata
import pkgutil
import threading
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any, Generic, TypeVar

from idlm.config.suggest import did_you_mean
from idlm.errors import UserError, naming

T = TypeVar("T")


class Registry(Generic[T]):
    """Members of one `kind` by name. The first look-up imports `package`; all of them raise its errors."""

    def __init__(self, kind: str, package: str | None) -> None:
        self.kind = kind
        self.package = package
        self._members: dict[str, T] = {}
        self._is_scanned = False
        self._error: Exception | None = None
        self._lock = threading.RLock()

    def register(self, name: str) -> Callable[[T], T]:
        """Return a decorator that adds its object as `name`; ValueError names both owners of a taken name."""

        def add(member: T) -> T:
            if name in self._members:
                raise ValueError(
                    f"{self.kind} {name!r} is registered twice: by {_origin(self._members[name])} and by "
                    f"{_origin(member)}; rename one of them"
                )
            self._members[name] = member
            return member

        return add

    def get(self, name: str, *, key: str = "", others: Iterable[str] = ()) -> T:
        """Return the member called `name`. UserError IDLM-0102 if it is unknown; `key` is the option that
        gave the name, `others` are names that this option takes and another registry has."""
        self._scan()
        if isinstance(name, str) and name in self._members:
            return self._members[name]
        names = sorted({*self._members, *others})
        raise UserError(
            "IDLM-0102",
            f"{key and f'{key}={name}: '}unknown {self.kind} {name!r}{did_you_mean(name, names)}",
            fix=f"choose one of: {', '.join(names) or '(none is registered)'}",
        )

    def names(self) -> list[str]:
        self._scan()
        return sorted(self._members)

    def _scan(self) -> None:
        with self._lock:
            if self._error is not None:
                raise self._error
            if self._is_scanned:
                return
            # Set first: a module of the package may look up another member while it is being imported.
            self._is_scanned = True
            try:
                if self.package is not None:
                    for module in pkgutil.iter_modules(importlib.import_module(self.package).__path__):
                        importlib.import_module(f"{self.package}.{module.name}")
                for entry in importlib.metadata.entry_points(group=f"idlm.{self.kind}s"):
                    self._load_entry_point(entry)
            except Exception as error:
                # A second import would name what the first one left half registered, not the cause.
                self._error = error
                raise

    def _load_entry_point(self, entry: importlib.metadata.EntryPoint) -> None:
        owner = entry.dist.name if entry.dist else entry.value
        what = f"the {self.kind} {entry.name!r} of the package {owner} cannot be loaded"
        with naming("IDLM-0103", what, fix=f"update or uninstall {owner}"):
            loaded: Any = entry.load()
        registered = self._members.get(entry.name)
        if registered is not loaded and not isinstance(loaded, ModuleType):
            self.register(entry.name)(loaded)


def _origin(member: Any) -> str:
    named = member if hasattr(member, "__qualname__") else type(member)
    return f"{named.__module__}.{named.__qualname__}"
