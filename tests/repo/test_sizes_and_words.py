"""Sizes, forbidden names, one standard term per idea, and no trace of how the project was made: text says
what is, not what was. A rule without a machine drifts.

Private words stay out of code, options, errors and documentation. "Law" is mathematics: the sampling law, and
the folders and commands that test it."""

from __future__ import annotations

import ast
import io
import re
import tokenize
import tomllib

import pytest

from tests.repo.files import ROOT, imported, listed, python_files, text_of, tree_of

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
PRIVATE = re.compile(
    r"(?<!<)(?<!</)\b(pictures?|in flight|lawless|grains?|seated|seats|sits down|sat down|whoever|nobody"
    r"|hires?|hired|obeys?|thinned)\b(?!>)",
    re.IGNORECASE,
)
PERSONS = re.compile(
    r"\b((?:finds?|found) no room|(?:rows|passes|positions|sequences) (?:ask|go on)\b"
    r"|(?:pass|row|position) asks|(?:is|are|was|were) asked for|rows behind the last|places? of a block)\b",
    re.IGNORECASE,
)
"""Things are not persons: rows do not fit, a position needs a row."""
GONE = re.compile(
    "|".join(
        (
            r"\b(?:asks?|asking|goes on|went on|going on)\b",
            r"(?<!\w\.)\b(?:tells?|telling)\b",
            r"(?<![\"\w])(?<!Tom )(?<!Lea )\bfinds\b",
            r"(?<!\")\bbeside\b",
            r"\bbehind\b(?! (?:a proxy|a router|routers|\w+-router|all three))",
            r"\b(?:is|are|was|were|been|being) kept\b",
            r"\b(?:says|said)\b",
        )
    ),
    re.IGNORECASE,
)
"""Words of the product's text for which the field has others; models learn sentences with some of them."""
NAMES = re.compile(
    r"_?(?:places?|dice|told|said|says|rooms?|least|most|recut|goes_on)(?:_[A-Z0-9]+)?|_?asked(?:_[A-Z0-9]+|_for)"
    r"|(?:least|most)_(?!common)\w+|(?!test_)\w+_(?:(?<!in_)places?|recut)(?:_[A-Z0-9]+)?|(?:Mend|Recut)\w+"
)
"""Names in code: an index or a position, a random generator, a minimum, a maximum, a limit."""
CONSTANTS = re.compile(r"\b((?:LEAST|MOST)_[A-Z_]+|[A-Z]+_(?:TO|FOR)_A_[A-Z]+)\b")
TRACES = re.compile(
    r"\b(issues? \d+|(?:this|the) issue(?:'s)?\b|shared facts|(?:a|the|next|last|this) lease\b|leases/"
    r"|reviews? found|founders?|colleagues?|renamed before)|_of_the_issue\b",
    re.IGNORECASE,
)
MEASURED = re.compile(r"commit [0-9a-f]{12}(?:\+|, [0-9a-f]{12})")
"""A caption that names a tree with changes, or several commits."""
LEFT_OUT = ("benchmarks/results/", "recipes/assets/", "tests/repo/test_sizes_and_words.py")
PAGE = (".html", ".css", ".js")
TEXTS = (".py", ".md", ".yaml", ".yml", ".toml", ".sh", ".gitignore", "Makefile", *PAGE)


def is_kernel(name: str) -> bool:
    return re.search(r"(^|/)kernels/\w+/kernel\w*\.py$", name) is not None


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


def test_file_and_function_sizes() -> None:
    found = []
    for name in FILES:
        maximum = MAX_CENTRAL if name in CENTRAL else MAX_FILE
        if (num_lines := text_of(name).count("\n")) > maximum:
            found.append(f"{name} has {num_lines} lines, at most {maximum}")
        limit = MAX_KERNEL if is_kernel(name) else MAX_FUNCTION
        too_long = [(function, lines) for function, lines in sizes(tree_of(name)) if lines > limit]
        if too_long:
            found.append(f"{name} has functions above {limit} lines: {too_long}")
    page = {name: text_of(name).count("\n") for name in listed(*CODE) if name.endswith(PAGE)}
    assert page
    found += [f"{name} has {num} lines" for name, num in page.items() if num > MAX_FILE]
    assert not found, "\n".join(found)


def test_no_forbidden_words() -> None:
    found = []
    for name in FILES:
        found += [f"{name}: {fault}" for fault in forbidden(tree_of(name))]
        for number, line in enumerate(text_of(name).splitlines(), start=1):
            if WORK_MARKS.search(line):
                found.append(f"{name}: line {number}: work that is left belongs into an issue")
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "code",
    [
        *("raise NotImplementedError", "import pickle", "from pickle import loads", "eval('1')"),
        *("torch.load(path)", "torch.load(path, weights_only=False)"),
        *("f(trust_remote_code=True)", "numpy.load(path, allow_pickle=True)"),
    ],
)
def test_the_check_itself_finds_faults(code: str) -> None:
    assert forbidden(ast.parse(code))
    assert not forbidden(ast.parse("torch.load(path, weights_only=True); model.eval()"))


def test_kernels_stay_a_namespace_and_import_nothing_of_ours() -> None:
    assert not (ROOT / "kernels" / "__init__.py").exists(), "transformers would import it in place of its own"
    for name in python_files("kernels"):
        names = imported(tree_of(name))
        ours = [one for one in names if one.split(".")[0] in ("idlm", "train", "infer", "conf")]
        strangers = [one for one in ours if not one.startswith("idlm.kernels.")]
        assert not strangers, f"{name} imports {strangers}"


def test_the_core_imports_no_kernels_and_the_linter_knows_all_of_it() -> None:
    core = python_files("idlm")
    for name in core:
        assert not [one for one in imported(tree_of(name)) if one.startswith("idlm.kernels")], name
    project = tomllib.loads(text_of("pyproject.toml"))
    contracts = {contract["id"]: contract for contract in project["tool"]["importlinter"]["contracts"]}
    modules = {".".join(name.removesuffix(".py").split("/")[:2]) for name in core} - {"idlm.__init__"}
    assert set(contracts["core"]["source_modules"]) >= modules


def test_one_import_name_for_each_module() -> None:
    roots = ("train", "infer", "conf")
    twins = [(name, one) for name in FILES for one in imported(tree_of(name)) if one.split(".")[0] in roots]
    assert not twins, f"import them as idlm.train, idlm.infer: {twins} would be loaded twice"


@pytest.mark.parametrize(
    ("link", "target"),
    [(f"idlm/{name}", f"../{name}") for name in ("train", "infer", "kernels", "conf")]
    + [("conf/recipe", "../recipes"), ("src/idlm", "../idlm")],
)
def test_links_of_the_tree_are_relative(link: str, target: str) -> None:
    assert (ROOT / link).is_symlink()
    assert (ROOT / link).readlink().as_posix() == target


def names_in(name: str, text: str) -> list[str]:
    """Private names in Python code, which words of a text may be."""
    if not name.endswith(".py") or not any(map(NAMES.fullmatch, set(re.findall(r"\w+", text)))):
        return []
    return [
        f"{name}:{token.start[0]}: {token.string}"
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type == tokenize.NAME and NAMES.fullmatch(token.string)
    ]


def words_in(name: str, text: str) -> list[str]:
    """Lines of a file with words that do not belong there."""
    gone = [] if name.startswith(("tests/", "idlm/tasks/")) else [GONE]
    constants = [CONSTANTS] if name.endswith(".py") else []
    patterns = (PRIVATE, PERSONS, TRACES, MEASURED, *gone, *constants)
    return names_in(name, text) + [
        f"{name}:{text.count(chr(10), 0, word.start()) + 1}: {word[0]}"
        for pattern in patterns
        for word in pattern.finditer(text)
    ]


def test_no_private_words_and_no_traces() -> None:
    names = [name for name in listed() if name.endswith(TEXTS) and not name.startswith(LEFT_OUT)]
    assert len(names) > 300, "git lists the files to check"
    found = [line for name in names for line in words_in(name, text_of(name))]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "line",
    [
        *("Whoever is seated", "MOST_ROWS = 1", "place = num_places_B", "rng = dice", "x = least_rows"),
        *("x = asked_B", "# A row that finds no room waits", "# logits that were asked for"),
        *("# W places of a block", "sizes are those of issue 15", "the issue's table"),
        *("# Training goes on", "# which a config asks for, tells, or finds"),
        *("# rows beside those behind the block", "# times are kept by it", "# what the plan says"),
        *("def test_sizes_are_those_of_the_issue", "the shared facts (section 8)"),
        *("The lease ended while its arms were decoded", "Smaller things that reviews found"),
        *("measured at commit c4d7865b3565, fe88c7e11259", "measured at commit dc999cb432e0+, today"),
    ],
)
def test_the_check_finds_words(line: str) -> None:
    assert words_in("x.py", f"{line}\n")
    assert not words_in("x.py", "mode = 'sampling law'  # at most, at commit c4d7865b3565\n")
