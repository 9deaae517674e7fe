"""Sizes and forbidden words: a rule without a machine drifts."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CODE = ("idlm", "train", "infer", "kernels", "benchmarks", "conf", "docs", "tests")
MAX_FILE, MAX_FUNCTION, MAX_KERNEL = 400, 60, 150
CENTRAL = (
    "infer/engine.py",
    "infer/build.py",
    "infer/evaluation/sandbox_candidate.py",
    "infer/runtime/stride_controller.py",
    "infer/state/batch.py",
    "train/step.py",
)
MAX_CENTRAL = 600
"""Files that read alone from top to bottom."""
FORBIDDEN_NAMES = {"NotImplementedError", "NotImplemented", "eval", "exec", "pickle", "dill", "cloudpickle"}
SAFE_VALUES = {"weights_only": True, "allow_pickle": False, "trust_remote_code": False}
WORK_MARKS = re.compile(r"\b(" + "|".join(("TO" + "DO", "FIX" + "ME", "X" * 3, "HA" + "CK")) + r")\b")


def python_files(*folders: str) -> list[Path]:
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard", "-z", *folders],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split("\0")
    paths = {ROOT / name for name in listed if name.endswith(".py")}
    return sorted(path for path in paths if path.is_file())


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def is_kernel(path: Path) -> bool:
    return path.name.startswith("kernel") and path.parent.parent.name == "kernels"


def sizes(tree: ast.AST) -> list[tuple[str, int]]:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return [
        (node.name, node.end_lineno - node.lineno + 1) for node in ast.walk(tree) if isinstance(node, kinds)
    ]


def _is_torch_load(function: ast.expr) -> bool:
    return isinstance(function, ast.Attribute) and ast.unparse(function) == "torch.load"


def forbidden(tree: ast.AST) -> list[str]:
    """Names and keyword arguments that have no place here, with their lines."""
    found = []
    for node in ast.walk(tree):
        names: list[str] = []
        # A field may bear such a name (`eval:` of a configuration); only a name that is read can do harm.
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            names = [node.id]
        elif isinstance(node, ast.Import):
            names = [alias.name.split(".")[0] for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [(node.module or "").split(".")[0]]
        elif isinstance(node, ast.keyword) and node.arg in SAFE_VALUES:
            is_safe = isinstance(node.value, ast.Constant) and node.value.value is SAFE_VALUES[node.arg]
            found += [] if is_safe else [f"line {node.lineno}: {node.arg}"]
        elif isinstance(node, ast.Call) and _is_torch_load(node.func):
            given = {keyword.arg for keyword in node.keywords}
            found += (
                [] if "weights_only" in given else [f"line {node.lineno}: torch.load without weights_only"]
            )
        found += [f"line {node.lineno}: {name}" for name in names if name in FORBIDDEN_NAMES]
    return found


FILES = python_files(*CODE)


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def test_there_is_something_to_check() -> None:
    assert len(FILES) > 10
    assert ROOT / "idlm" / "checkpoint.py" in FILES


def test_file_and_function_sizes() -> None:
    found = []
    for path in FILES:
        num_lines = path.read_text(encoding="utf-8").count("\n")
        maximum = MAX_CENTRAL if relative(path) in CENTRAL else MAX_FILE
        if num_lines > maximum:
            found.append(f"{relative(path)} has {num_lines} lines, at most {maximum}")
        limit = MAX_KERNEL if is_kernel(path) else MAX_FUNCTION
        too_long = [(name, lines) for name, lines in sizes(tree_of(path)) if lines > limit]
        if too_long:
            found.append(f"{relative(path)} has functions above {limit} lines: {too_long}")
    assert not found, "\n".join(found)


def test_no_forbidden_words() -> None:
    found = []
    for path in FILES:
        found += [f"{relative(path)}: {fault}" for fault in forbidden(tree_of(path))]
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            if WORK_MARKS.search(line):
                found.append(f"{relative(path)}: line {number}: work that is left belongs into an issue")
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "code",
    [
        "raise NotImplementedError",
        "import pickle",
        "from pickle import loads",
        "eval('1')",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "f(trust_remote_code=True)",
        "numpy.load(path, allow_pickle=True)",
    ],
)
def test_the_check_itself_finds_faults(code: str) -> None:
    assert forbidden(ast.parse(code))
    assert not forbidden(ast.parse("torch.load(path, weights_only=True); model.eval()"))


def test_importing_the_package_is_cheap() -> None:
    code = "import sys, idlm; print([m for m in sys.modules if m.split('.')[0] in {heavy}])".format(
        heavy={"torch", "transformers", "numpy", "hydra", "datasets", "deepspeed", "wandb"}
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"


def imports(path: Path) -> list[str]:
    """Full dotted names that a file imports, wherever in it."""
    found = []
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{relative(path)} has a relative import"
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


def test_kernels_stay_a_namespace_and_import_nothing_of_ours() -> None:
    assert not (ROOT / "kernels" / "__init__.py").exists(), "transformers would import it in place of its own"
    for path in python_files("kernels"):
        ours = [name for name in imports(path) if name.split(".")[0] in ("idlm", "train", "infer", "conf")]
        strangers = [name for name in ours if not name.startswith("idlm.kernels.")]
        assert not strangers, f"{relative(path)} imports {strangers}"


def test_the_core_imports_no_kernels_and_the_linter_knows_all_of_it() -> None:
    core = python_files("idlm")
    for path in core:
        assert not [name for name in imports(path) if name.startswith("idlm.kernels")], relative(path)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    contracts = {contract["id"]: contract for contract in project["tool"]["importlinter"]["contracts"]}
    modules = {".".join(path.relative_to(ROOT).with_suffix("").parts[:2]) for path in core} - {
        "idlm.__init__"
    }
    assert set(contracts["core"]["source_modules"]) >= modules


def test_one_import_name_for_each_module() -> None:
    roots = ("train", "infer", "conf")
    twins = [
        (relative(path), name) for path in FILES for name in imports(path) if name.split(".")[0] in roots
    ]
    assert not twins, f"import them as idlm.train, idlm.infer: {twins} would be loaded twice"


@pytest.mark.parametrize(
    ("link", "target"),
    [(f"idlm/{name}", f"../{name}") for name in ("train", "infer", "kernels", "conf")]
    + [("conf/recipe", "../recipes"), ("src/idlm", "../idlm")],
)
def test_links_of_the_tree_are_relative(link: str, target: str) -> None:
    assert (ROOT / link).is_symlink()
    assert (ROOT / link).readlink().as_posix() == target
