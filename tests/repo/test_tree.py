"""The tree: folders that a reader can take in, a product that does not grow, and no circles of imports."""

from __future__ import annotations

import ast
from collections import Counter
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.repo.files import PRODUCT, imported, python_files, text_of, tree_of

MAX_FILES_IN_FOLDER, MAX_PRODUCT_LINES, MAX_BENCHMARK_LINES = 14, 64_671, 9_988


def module_name(name: str) -> str:
    """Return the dotted name under which a file is imported: `infer/engine.py` is `idlm.infer.engine`."""
    parts = Path(name).with_suffix("").parts
    parts = parts if parts[0] == "idlm" else ("idlm", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(tree: ast.Module, modules: set[str]) -> set[str]:
    """Return those of `modules` that code imports; `from package import name` imports a submodule if one has
    that name, and the package if not."""
    names = imported(tree)
    return {name if name in modules else name.rpartition(".")[0] for name in names} & modules


def circle(graph: dict[str, set[str]]) -> list[str]:
    """Return the modules of a circle of imports, the first one again at the end; empty if there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def folders() -> Counter[str]:
    return Counter(Path(name).parent.as_posix() for name in python_files(*PRODUCT, "benchmarks", "tests"))


@pytest.mark.parametrize("folder", sorted(folders()))
def test_a_folder_has_few_files(folder: str) -> None:
    num = folders()[folder]
    assert num <= MAX_FILES_IN_FOLDER, f"{folder} has {num} Python files, at most {MAX_FILES_IN_FOLDER}"


@pytest.mark.parametrize(
    ("folders", "maximum"), [(PRODUCT, MAX_PRODUCT_LINES), (("benchmarks",), MAX_BENCHMARK_LINES)]
)
def test_the_code_does_not_grow(folders: tuple[str, ...], maximum: int) -> None:
    lines = dict.fromkeys(folders, 0)
    for name in python_files(*folders):
        lines[name.partition("/")[0]] += text_of(name).count("\n")
    assert sum(lines.values()) <= maximum, lines


def test_no_circles_of_imports() -> None:
    names = {module_name(name): name for name in python_files(*PRODUCT)}
    modules = set(names)
    graph = {module: imports_of(tree_of(name), modules) - {module} for module, name in names.items()}
    # `idlm/__init__.py` loads the public classes on first use, and all modules are below it.
    graph["idlm"] = set()
    assert len(graph) > 100
    assert not circle(graph), " <- ".join(circle(graph))


@pytest.mark.parametrize(("product", "pairs"), [("train", {"checkpoint loop", "data objectives"})])
def test_few_folders_import_each_other(product: str, pairs: set[str]) -> None:
    names = {module_name(name): name for name in python_files(product)}
    folder = {module: Path(name).parts[1] for module, name in names.items() if name.count("/") > 1}
    arrows = {
        (folder[module], folder[other])
        for module, name in names.items()
        for other in imports_of(tree_of(name), set(names))
        if module in folder and other in folder
    }
    assert len(arrows) > 10
    assert {f"{a} {b}" for a, b in arrows if a < b and (b, a) in arrows} == pairs


def test_the_check_itself_finds_circles() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": {"e"}, "e": set()}
    assert set(circle(graph)) == {"a", "b", "c"}
    assert not circle(graph | {"c": {"d"}})
    code = (
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    from idlm.infer.a import A\n"
        "def f():\n    from idlm.infer import b\n    import idlm.infer.c\n    from idlm.infer import B\n"
    )
    modules = {f"idlm.infer.{name}" for name in "abcd"} | {"idlm.infer"}
    assert imports_of(ast.parse(code), modules) == modules - {"idlm.infer.d"}
