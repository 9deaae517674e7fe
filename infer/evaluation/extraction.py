"""The answer in a response, as the paper extracts it (arXiv 2604.11035, appendix H.4), and equality of
mathematical answers."""

from __future__ import annotations

import ast
import builtins
import itertools
import re
import symtable
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import suppress

from idlm.infer.evaluation.mathematics.equality import MATH_VERIFY

BOXED = re.compile(r"\\(?:boxed|fbox)\s*\{")
BARE_BOX = re.compile(r"\\(?:boxed|fbox)\s*(-?(?:\d\w*(?:[.,/]\d\w*)*|[A-Za-z]\b))")
BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
"""Braces, and what is escaped, such as the brace of a set."""
_SPACES = r"(?:\s|\$|\\[()\[\],;]|\\q?quad)*+"
CONNECTED = re.compile(
    rf"{_SPACES}(?:,|,?\s*+(?:\\text\s*+\{{)?\s*+(?:and|or)\s*+\}}?)"
    rf"{_SPACES}(?:[A-Za-z](?:_\{{?\w+\}}?)?\s*=\s*)?"
)
"""Between two boxes of one answer."""
_OPEN = re.compile(r"(?P<before>.*?)(?<![`~])(?P<fence>`{3,}+|~{3,}+)[ \t]*(?P<info>[^`~]*)")
_LOCATION = re.compile(r"(?:[ \t]*>)*[ \t]*(?:(?:[-*+]|\d+[.)])[ \t]+)?")
_PYTHON = re.compile(r"\{?\.?i?py(?:thon|con)?[\d.]*(?!\w)", re.IGNORECASE)
_BEGIN = re.compile(r"^(?:import [\w.]+|from [\w.]+ import |(?:async )?def \w|class \w|@\w)", re.MULTILINE)
_PROMPT = re.compile(r"^(?:>>>|\.\.\.)(?: |$)(.*\n?)", re.MULTILINE)
_FUNCTION = re.compile(r"^\s*(?:async )?def \w+", re.MULTILINE)
_OWN = re.compile(r"(?:async )?def |class |import |from |@")
UNPARSED = (SyntaxError, ValueError, RecursionError, MemoryError)
MAX_TRIALS = 16
"""Lines that are tried as the end of a block, or as the begin or the end of code."""


def strip_thinking(text: str) -> str:
    """Return what follows the thinking; nothing if it never ends."""
    _, closed, answer = text.rpartition("</think>")
    if closed:
        return answer
    return "" if "<think>" in text else text


def boxed(text: str) -> str | None:
    r"""Return the content of the last complete `\boxed{...}` after the thinking that is not empty, braces
    balanced, or None. Boxes that a comma, `and` or `or` connects are one answer, as to math-verify."""
    # A word after it is no answer: sentences about boxes have one.
    text = BARE_BOX.sub(r"\\boxed{\1}", strip_thinking(text))
    contents, last = list[str](), len(text)
    for begin in reversed([*BOXED.finditer(text)]):
        end = _closing_brace(text, begin.end())
        if end is None or not (content := text[begin.end() : end].strip()):
            continue
        if contents and not CONNECTED.fullmatch(text, end + 1, last):
            break
        contents.insert(0, content)
        last = begin.start()
    return ", ".join(dict.fromkeys(contents)) or None


def _closing_brace(text: str, start: int) -> int | None:
    depth = 1
    for brace in BRACE.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return brace.start()
    return None


def function_block(text: str, names: Sequence[str] = (), *, stub: str = "") -> str | None:
    """Return the last Python code block after the thinking that defines one of the `names`, else the last one
    with a method of that name, with the body of the function that `stub` ends in, or with any function, or
    None. What it needs of the other blocks, such as imports and other functions, comes before it; a
    definition without a body does not count where there is another. A text without a block may be or contain
    the code."""
    text = strip_thinking(text)
    fenced = [*filter(str.strip, python_blocks(text))]
    blocks = fenced if any(map(_FUNCTION.search, fenced)) else [*_unfenced(text), *fenced]
    any_name = "|".join(map(re.escape, names)) or "(?!)"
    defined = rf"^(?:(?:async )?def|class) (?:{any_name})\b|^(?:{any_name})\s*(?::[^=\n]*)?=(?!=)"
    for pattern in (defined, rf"^[ \t]+def (?:{any_name})\b"):
        if found := [block for block in blocks if re.search(pattern, block, re.MULTILINE)]:
            break
    else:
        if stub and (code := _with_body(stub, fenced or [text], names)):
            return code
        found = [block for block in blocks if _FUNCTION.search(block)]
    full = [block for block in found if not _is_stub(block, names)] or found
    return _completed(full[-1], blocks, names) + _methods(full[-1], names) if full else None


def _unfenced(text: str) -> list[str]:
    """The text, without marks such as [DONE], if it is Python, else its first part that has a function."""
    text = re.sub(r"^\[/?[A-Z]+\]$|\A\s*python\d*$", "", text, flags=re.MULTILINE)
    begins = (begin.start() for begin in itertools.islice(_BEGIN.finditer(text), MAX_TRIALS))
    codes = [f"{text.strip()}\n"] if statements(text) else (_whole(text[begin:]) for begin in begins)
    return [*itertools.islice(filter(_FUNCTION.search, codes), 1)]


def _whole(code: str) -> str:
    """The code up to what is not Python, such as a text after it or a line that is cut off."""
    lines = code.splitlines(keepends=True)
    for _ in range(MAX_TRIALS):
        with suppress(*UNPARSED):
            try:
                compile("".join(lines), "code", "exec", dont_inherit=True)
                return "".join(lines)
            except SyntaxError as error:
                del lines[min(error.lineno or 1, len(lines)) - 1 :]
    return ""


def _with_body(stub: str, bodies: Sequence[str], names: Sequence[str]) -> str | None:
    """The stub of a function with the last of the texts that is its body, of which the indentation of the
    first line or of all may lack."""
    for body in reversed(bodies):
        forms = body.strip("\n"), f"    {body.strip()}", textwrap.indent(body, "    ")
        codes = [_whole(f"{stub.rstrip()}\n{form}\n") for form in forms]
        code = max(codes, key=lambda each: each.count("\n"))
        functions = (node for node in statements(code) if not {*names}.isdisjoint(_bound(node)))
        if not all(_is_stub(ast.unparse(node), names) for node in functions):
            return code
    return None


def _methods(code: str, names: Sequence[str]) -> str:
    """Names that a class of the code defines, as functions."""
    bound = {name for node in statements(code) for name in _bound(node)}
    return "".join(
        f"{each.name} = {node.name}().{each.name}\n"
        for node in statements(code)
        if isinstance(node, ast.ClassDef)
        for each in node.body
        if isinstance(each, ast.FunctionDef) and each.name in {*names} - bound
    )


def statements(code: str) -> list[ast.stmt]:
    """The statements of the code; none where it is not Python."""
    with suppress(*UNPARSED):
        return ast.parse(code).body
    return []


def _is_stub(code: str, names: Sequence[str]) -> bool:
    """Whether no function of the code with one of the names has a body, or none at all."""
    nodes = itertools.chain.from_iterable(map(ast.walk, statements(code)))
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    wanted = [each for each in functions if each.name in names] or functions
    return bool(wanted) and all(
        isinstance(each, ast.Pass | ast.Import | ast.ImportFrom)
        or (isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant))
        for function in wanted
        for each in function.body
    )


def _completed(code: str, blocks: Sequence[str], names: Sequence[str]) -> str:
    """The code after those statements of other blocks that define what it lacks of itself and of `names`: of
    several, the last before it, else the first after it."""
    position = blocks.index(code)
    chosen: dict[tuple[int, int], str] = {}
    bound, lacking = set[str](), [*names]
    with suppress(*UNPARSED):
        lacking += _globals_of(code)
        bound |= {name for node in statements(code) for name in _bound(node)}
        others = [*range(position - 1, -1, -1), *range(position + 1, len(blocks))]
        for index, line, source in _definitions("annotations", blocks, others):
            if source.startswith("from __future__"):
                chosen[index, line] = source
        while lacking:
            if (name := lacking.pop()) in bound:
                continue
            bound.add(name)
            for index, line, source in _definitions(name, blocks, others):
                chosen[index, line] = source
                lacking += _globals_of(source)
                # A star may lack the name.
                if not source.endswith("*"):
                    break
    return "\n".join([*(chosen[key] for key in sorted(chosen)), code])


def _definitions(name: str, blocks: Sequence[str], order: Sequence[int]) -> Iterator[tuple[int, int, str]]:
    """Statements of the blocks that define the name: block, line and text."""
    for index in order:
        for node in reversed(statements(blocks[index])):
            if not {name, "*"}.isdisjoint(_bound(node)):
                yield index, node.lineno, ast.unparse(node)


def _bound(node: ast.stmt) -> list[str]:
    """The names that a statement of a module defines."""
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return [node.name]
        case ast.Import() | ast.ImportFrom():
            return [each.asname or each.name.partition(".")[0] for each in node.names]
        case ast.Assign() | ast.AnnAssign():
            names = (each for each in ast.walk(node) if isinstance(each, ast.Name))
            return [each.id for each in names if isinstance(each.ctx, ast.Store)]
    return []


def _globals_of(code: str) -> list[str]:
    """Names that the code takes from its module, those of Python left out."""
    top = symtable.symtable(code, "code", "exec")
    tables, found = [top], list[str]()
    for table in tables:
        tables += table.get_children()
        used = (each for each in table.get_symbols() if each.is_referenced())
        found += [each.get_name() for each in used if each.is_global() or table is top]
    return [name for name in found if not hasattr(builtins, name)]


def python_blocks(text: str) -> list[str]:
    """The contents of fenced blocks whose info string is Python or empty, without their indentation. A fence
    may follow the mark of a list or quotation or, of Python, any text. A block of Python ends at the first
    fence before which it can be parsed, since a docstring may hold fences too, and one without an end at what
    is cut off; of a transcript the input is the code. A block that begins inside the function of the block
    before it is a part of that one."""
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    blocks, index = list[str](), 0
    while index < len(lines):
        opened = _OPEN.fullmatch(lines[index])
        index += 1
        if opened is None:
            continue
        is_alone = bool(_LOCATION.fullmatch(opened["before"]))
        if _is_python(opened) or (is_alone and not opened["info"]):
            code, index = _block(lines, index, opened["fence"], opened["before"] if is_alone else "")
            if blocks and _continues(blocks[-1], code):
                blocks[-1] += code
            else:
                code = textwrap.dedent(code) if code.lstrip("\n")[:1].isspace() else code
                code = "".join(_PROMPT.findall(code)) if code.startswith(">>>") else code
                blocks.append(code if index < len(lines) else _whole(code) or code)
        elif is_alone:
            index = _end(lines, index, opened["fence"])
        # What ends a block may begin the next one.
        if index < len(lines) and not _is_python(_OPEN.fullmatch(lines[index])):
            index += 1
    return blocks


def _block(lines: list[str], start: int, fence: str, before: str) -> tuple[str, int]:
    """The code of a block of Python, and the line that ends it."""
    ends = (index for index in range(start, len(lines)) if fence in lines[index])
    for end in itertools.islice(ends, MAX_TRIALS):
        last = lines[end].partition(fence)[0]
        if last.lstrip().startswith("#"):
            continue
        code = _code([*lines[start:end], last], before)
        with suppress(*UNPARSED):
            ast.parse(textwrap.dedent(code))
            return code, end
    end = _end(lines, start, fence)
    return _code(lines[start:end], before), end


def _end(lines: list[str], start: int, fence: str) -> int:
    for index in range(start, len(lines)):
        line = lines[index].strip("> \t")
        if (line.startswith(fence) and not line.strip(fence[0])) or _is_python(_OPEN.fullmatch(line)):
            return index
    return len(lines)


def _is_python(opened: re.Match[str] | None) -> bool:
    return opened is not None and bool(_PYTHON.match(opened["info"]))


def _code(lines: list[str], before: str) -> str:
    if ">" in before:
        lines, before = [re.sub(r"^(?:[ \t]*>)+ ?", "", line) for line in lines], ""
    first = next(filter(str.strip, lines), "")
    width = min(len(before), _indent(first))
    indents = (min(width, _indent(line)) for line in lines)
    return "\n".join(line[indent:] for line, indent in zip(lines, indents, strict=True)).rstrip() + "\n"


def _continues(before: str, code: str) -> bool:
    """Whether the code is indented and continues the function that `before` ends in, and does not quote
    it."""
    is_inner = code.lstrip("\n")[:1].isspace() and not _OWN.match(code.strip())
    if not is_inner or code.strip() in before:
        return False
    with suppress(*UNPARSED):
        compile(before + code, "code", "exec", dont_inherit=True)
        return True
    return False


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def same_answer(given: str, expected: str) -> bool:
    """Whether two mathematical answers are equal: as texts or to math-verify."""
    if given.strip() == expected.strip():
        return bool(given.strip())
    return MATH_VERIFY.are_equal(given, expected)
