"""Registries find what lies in their package, refuse collisions and suggest for unknown names."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path

import pytest

from idlm.registry import Registry
from tests.errors import refused


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "plugs_for_test"
    root.mkdir()
    (root / "__init__.py").write_text(
        "from idlm.registry import Registry\nPLUGS = Registry('plug', __name__)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.split(".")[0] == root.name]:
        monkeypatch.delitem(sys.modules, name)
    return root


def write_plug(package: Path, name: str, extra: str = "") -> None:
    text = (
        f"from plugs_for_test import PLUGS\n{extra}\n@PLUGS.register({name!r})\ndef plug(): return {name!r}\n"
    )
    (package / f"{name}_file.py").write_text(text)


def load(package: Path) -> Registry:
    return __import__(package.name).PLUGS


def test_every_module_of_the_package_is_found_without_a_list(package: Path) -> None:
    write_plug(package, "alpha")
    write_plug(package, "beta")
    registry = load(package)
    assert registry.names() == ["alpha", "beta"]
    assert registry.get("beta")() == "beta"


def test_unknown_name_gets_nearest_and_list(package: Path) -> None:
    write_plug(package, "alpha")
    write_plug(package, "omega")
    error = refused("did you mean 'alpha'", load(package).get, "alhpa")
    assert error.code == "IDLM-0102"
    assert "alpha, omega" in error.fix


def test_collision_names_both_owners(package: Path) -> None:
    write_plug(package, "alpha")
    (package / "other.py").write_text((package / "alpha_file.py").read_text())
    with pytest.raises(
        ValueError, match=r"plugs_for_test\.alpha_file\.plug and by plugs_for_test\.other\.plug"
    ):
        load(package).names()


def test_import_error_of_a_member_propagates_every_time(package: Path) -> None:
    """Also that of a module which registers a member before it fails: a second import would name that."""
    write_plug(package, "alpha")
    write_plug(package, "zeta")
    with (package / "zeta_file.py").open("a") as file:
        file.write("import a_module_that_is_missing\n")
    registry = load(package)
    for _ in range(2):
        with pytest.raises(ModuleNotFoundError, match="a_module_that_is_missing"):
            registry.get("alpha")


def test_a_member_may_look_up_another_while_imported(package: Path) -> None:
    write_plug(package, "alpha")
    write_plug(package, "beta", extra="assert PLUGS.get('alpha')() == 'alpha'")
    assert load(package).names() == ["alpha", "beta"]


@pytest.mark.parametrize(("value", "is_good"), [("math:sqrt", True), ("math:no_such_thing", False)])
def test_entry_points_are_loaded(monkeypatch: pytest.MonkeyPatch, value: str, is_good: bool) -> None:
    entry = importlib.metadata.EntryPoint(name="root", value=value, group="idlm.plugs")
    calls: list[str] = []

    def entry_points(*, group: str) -> list[importlib.metadata.EntryPoint]:
        calls.append(group)
        return [entry]

    monkeypatch.setattr(importlib.metadata, "entry_points", entry_points)
    registry: Registry = Registry("plug", None)
    if is_good:
        assert registry.get("root")(9.0) == 3.0
    else:
        error = refused("cannot be loaded", registry.names)
        assert error.code == "IDLM-0103"
    assert calls == ["idlm.plugs"]
