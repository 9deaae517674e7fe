"""Plug-ins for the time of a test: files in a folder of their own that a registry finds as if they were in
its package."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from idlm.registry import Registry


@contextmanager
def plugged_in(registry: Registry[Any], folder: Path) -> Iterator[list[str]]:
    """Inside, the files of `folder` belong to the registry's package; yields the names that they add."""
    assert registry.package is not None
    package, before = importlib.import_module(registry.package), registry.names()
    members = dict(registry._members)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(package, "__path__", [*package.__path__, str(folder)])
        patch.setattr(registry, "_is_scanned", False)
        try:
            yield [name for name in registry.names() if name not in before]
        finally:
            registry._members = members
            for module in pkgutil.iter_modules([str(folder)]):
                sys.modules.pop(f"{registry.package}.{module.name}", None)
