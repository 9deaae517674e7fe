"""docs/errors.md from the source: every IDLM code with its message and fix.

`python -m docs.errors` writes the page, `--check` compares. `...` stands for values that only a run has."""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "errors.md"
FOLDERS = ("idlm", "train", "infer", "kernels", "recipes")
CODE = re.compile(r"IDLM-\d{4}")
GAP = "..."
POINTER = ("... is a pointer of Git LFS: the clone has no content of the file", "git -C ... lfs pull")
SHARED: dict[str, tuple[tuple[str, str], ...]] = {
    "naming": (("{what}: ...", "{fix}"),),
    "translate_path_errors": (("cannot open ...", "{fix}"),),
    "refuse_pointer": (POINTER,),
    "opened": (
        ("cannot open ...", "{fix}"),
        ("... is not a file", "{fix}"),
        ("... is incomplete or damaged: ...", "copy or download the file again; or {fix}"),
        POINTER,
    ),
}
"""Messages and fixes of functions that raise the code that they are given."""
AREAS = {
    "01": "Configuration and plug-ins",
    "02": "Data and tasks",
    "03": "Checkpoints and result files",
    "04": "Decoding and the engine",
    "05": "Training",
    "06": "Models and weights",
    "07": "Serving",
}
HEAD = """# Errors

A mistake in input or configuration ends with a code, a message and a fix, without a traceback. In Python it
is an `idlm.errors.UserError`. A code is stable and names one cause. `...` stands for your own values.

This page is generated from the source: `python -m docs.errors`.
"""


class Raised(NamedTuple):
    """One way in which a code is raised."""

    code: str
    message: str
    fix: str


def text_of(node: ast.expr | None, local: dict[str, ast.expr]) -> str:
    """A string expression with `...` for all that is only known when it is raised."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(text_of(part, local) for part in parts)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return text_of(left, local) + text_of(right, local)
        case ast.FormattedValue(
            value=ast.Call(func=ast.Name(id="install_command"), args=[ast.Constant(value=str(extra))])
        ):
            return f"pip install -e '.[{extra}]' in the clone"
        case ast.Name(id=name) if name in local:
            return text_of(local[name], {key: value for key, value in local.items() if key != name})
    return GAP


def helper_of(node: ast.AST) -> tuple[str, str] | None:
    """(name, code) of a function that makes the error of one code of its arguments; None for others."""
    if not (isinstance(node, ast.FunctionDef) and isinstance(node.body[-1], ast.Return)):
        return None
    match node.body[-1].value:
        case ast.Call(
            func=ast.Name(id="UserError"),
            args=[ast.Constant(value=str(code)), ast.Name()],
            keywords=[ast.keyword(value=ast.Name(id=fix))],
        ) if fix in [one.arg for one in node.args.kwonlyargs]:
            return node.name, code
    return None


def raised_in(tree: ast.Module, helpers: dict[str, str]) -> Iterator[Raised]:
    """Every call whose first argument is a code, and every call of `helpers`, codes by name."""
    scopes = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    constants = assigned(tree.body)
    for scope in filter(helper_of, scopes):
        scope.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in helpers:
            arguments = [ast.Constant(helpers[node.func.id]), *node.args]
            node = ast.copy_location(ast.Call(ast.Name("UserError"), arguments, node.keywords), node)
        if not (isinstance(node, ast.Call) and node.args and is_code(node.args[0])):
            continue
        local = dict(constants)
        for scope in (each for each in scopes if contains(each, node)):
            local |= assigned(ast.walk(scope))
        fix = next((keyword.value for keyword in node.keywords if keyword.arg == "fix"), None)
        if fix is None and len(node.args) > 2:
            fix = node.args[2]
        message = node.args[1] if len(node.args) > 1 else None
        text = text_of(message, local)
        code, fix_text = text_of(node.args[0], {}), text_of(fix, local)
        called = node.func.id if isinstance(node.func, ast.Name) else ""
        for shared_text, shared_fix in SHARED.get(called, (("{what}", "{fix}"),)):
            yield Raised(code, shared_text.format(what=text), shared_fix.format(fix=fix_text))


def is_code(node: ast.expr) -> bool:
    """Whether the expression is a code."""
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and bool(CODE.fullmatch(node.value))


def contains(scope: ast.FunctionDef, node: ast.Call) -> bool:
    """Whether the call stands in the function, by line numbers."""
    return scope.lineno <= node.lineno <= (scope.end_lineno or scope.lineno)


def assigned(nodes: Iterable[ast.AST]) -> dict[str, ast.expr]:
    """Plain names that are assigned exactly once."""
    found: dict[str, list[ast.expr]] = {}
    for node in nodes:
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            found.setdefault(node.targets[0].id, []).append(node.value)
    return {name: values[0] for name, values in found.items() if len(values) == 1}


def every_code() -> list[Raised]:
    """All codes of the source, in order, each way of raising it once."""
    paths = (path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in paths]
    helpers = dict(filter(None, (helper_of(node) for tree in trees for node in tree.body)))
    return sorted({found for tree in trees for found in raised_in(tree, helpers)})


def cell(text: str) -> str:
    """One cell of a table."""
    text = re.sub(r"(?:\.\.\.\s*)+\.\.\.", GAP, " ".join(text.split()))
    return re.sub(r"([|<>*_\[\]`$])", r"\\\1", text) or "-"


def page() -> str:
    """The whole page."""
    found = every_code()
    parts = [HEAD]
    for prefix, title in AREAS.items():
        codes = sorted({each.code for each in found if each.code[5:7] == prefix})
        parts.append(f"\n## {title}\n\n| code | message | fix |\n|---|---|---|\n")
        for code in codes:
            shown = f'<a id="{code.lower()}"></a>{code}'
            ways = dict.fromkeys((cell(each.message), cell(each.fix)) for each in found if each.code == code)
            for message, fix in ways:
                message = "every problem, by name" if message == GAP else message
                parts.append(f"| {shown} | {message} | {fix} |\n")
                shown = ""
    return "".join(parts)


def main(arguments: list[str] | None = None) -> int:
    """Write the page; --check writes nothing and returns 1 when it is stale."""
    parser = argparse.ArgumentParser(prog="python -m docs.errors", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; status 1 when the page is stale")
    if parser.parse_args(arguments).check:
        is_fresh = PAGE.is_file() and PAGE.read_text(encoding="utf-8") == page()
        print("" if is_fresh else "docs/errors.md is stale; run python -m docs.errors", end="")
        return int(not is_fresh)
    PAGE.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
