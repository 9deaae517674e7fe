"""The tree: folders that a reader can take in, a product that does not grow, and no circles of imports."""

from __future__ import annotations

import ast
import subprocess
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = ("idlm", "infer", "train", "kernels")
MAX_FILES_IN_FOLDER, MAX_PRODUCT_LINES, MAX_BENCHMARK_LINES = 14, 60_509, 10_859
Graph = dict[str, set[str]]


def python_files(*folders: str) -> list[str]:
    """Return the Python files of `folders`, relative to the root, without links."""
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard", "-z", *folders],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split("\0")
    return sorted({name for name in listed if name.endswith(".py") and (ROOT / name).is_file()})


def module_name(name: str) -> str:
    """Return the dotted name under which a file is imported: `infer/engine.py` is `idlm.infer.engine`."""
    parts = Path(name).with_suffix("").parts
    parts = parts if parts[0] == "idlm" else ("idlm", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(code: str, modules: set[str]) -> set[str]:
    """Return those of `modules` that `code` imports anywhere: in functions and under TYPE_CHECKING too."""
    found = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            # `from package import name` imports a submodule if one has that name, and the package if not.
            found |= {name if name in modules else node.module for name in names}
    return found & modules


def circles(graph: Graph) -> list[list[str]]:
    """Return the strongly connected components with more than one module (Kosaraju's algorithm)."""
    order: list[str] = []
    seen: set[str] = set()

    def visit(node: str, arrows: Graph, out: list[str]) -> None:
        stack = [(node, iter(sorted(arrows[node])))]
        seen.add(node)
        while stack:
            unseen = next((one for one in stack[-1][1] if one not in seen), None)
            if unseen is None:
                out.append(stack.pop()[0])
            else:
                seen.add(unseen)
                stack.append((unseen, iter(sorted(arrows[unseen]))))

    for node in sorted(graph):
        if node not in seen:
            visit(node, graph, order)
    reverse: Graph = {node: set() for node in graph}
    for node, targets in graph.items():
        for target in targets:
            reverse[target].add(node)
    seen.clear()
    found = []
    for node in reversed(order):
        if node not in seen:
            component: list[str] = []
            visit(node, reverse, component)
            found.append(sorted(component))
    return sorted(component for component in found if len(component) > 1)


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
        lines[name.partition("/")[0]] += (ROOT / name).read_text(encoding="utf-8").count("\n")
    assert sum(lines.values()) <= maximum, lines


def test_no_circles_of_imports() -> None:
    names = {module_name(name): name for name in python_files(*PRODUCT)}
    modules = set(names)
    graph = {
        module: imports_of((ROOT / name).read_text(encoding="utf-8"), modules) - {module}
        for module, name in names.items()
    }
    # `idlm/__init__.py` loads the public classes on first use, and all modules are below it.
    graph["idlm"] = set()
    assert len(graph) > 100
    found = circles(graph)
    assert not found, "\n".join(" <-> ".join(circle) for circle in found)


@pytest.mark.parametrize(("product", "pairs"), [("train", {"checkpoint loop", "data objectives"})])
def test_few_folders_import_each_other(product: str, pairs: set[str]) -> None:
    names = {module_name(name): name for name in python_files(product)}
    folder = {module: Path(name).parts[1] for module, name in names.items() if name.count("/") > 1}
    arrows = {
        (folder[module], folder[other])
        for module, name in names.items()
        for other in imports_of((ROOT / name).read_text(encoding="utf-8"), set(names))
        if module in folder and other in folder
    }
    assert len(arrows) > 10
    assert {f"{a} {b}" for a, b in arrows if a < b and (b, a) in arrows} == pairs


def test_the_check_itself_finds_circles() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": {"e"}, "e": set()}
    assert circles(graph) == [["a", "b", "c"]]
    code = (
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    from idlm.infer.a import A\n"
        "def f():\n    from idlm.infer import b\n    import idlm.infer.c\n    from idlm.infer import B\n"
    )
    modules = {f"idlm.infer.{name}" for name in "abcd"} | {"idlm.infer"}
    assert imports_of(code, modules) == modules - {"idlm.infer.d"}
