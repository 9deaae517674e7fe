"""The process that compares mathematical answers with math-verify, which `equality.py` starts and ends:
math-verify stops long computations of SymPy by a signal, which only a main thread gets, and a tower of powers
can take all time and memory. It imports nothing of ours. A line of JSON in, the answer given and the one
expected; a line out, whether they are equal."""

from __future__ import annotations

import json
import logging
import os
import re
import resource
import sys
import unicodedata
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from latex2sympy2_extended import NormalizationConfig
from latex2sympy2_extended.latex2sympy2 import ConversionConfig
from latex2sympy2_extended.sets import FiniteSet
from math_verify import LatexExtractionConfig, parse, parser, verify
from sympy import Abs, And, Expr, Ge, Gt, Le, Lt, Or, Symbol, UnevaluatedExpr

# Else K is k, and E is the number e.
parser.latex2sympy = partial(parser.latex2sympy, conversion_config=ConversionConfig(lowercase_symbols=False))

NFKC = partial(unicodedata.normalize, "NFKC")
FOLDER = Path(__file__).parent
MEMORY = 4 << 30
MAX_GAP = 1e-5
"""Of two numbers, as a share of one: 0.333333 is a third."""
SPACE = re.compile(r"(?<!\\)(?:\\[,;:> ]|~)")
PERCENT = re.compile(r"\s*(?:\\?%|percent|\\text\s*\{\s*(?:\\?%|percent)\s*\})$")
# A sec at the end is a unit.
FUNCTION = r"(?:(?:arc)?(?:sin|cos|tan|cot|csc)h?|sec(?!$)|log|ln|exp|sqrt|pi)"
ABBREVIATION = r"(?:[cdk]m|mm|k?mph|ft|mi|yd|in|[km]g|lbs?|oz|m[lL]|hrs?|ms)"
MEASURE = rf"(?:sq\.?\s+)?(?:m(?=[/^])|units?|{ABBREVIATION})\.?(?:/[a-z]+)?(?:\^\{{?[23]\}}?)?"
CHANGE = (
    r"(?:plus|minus|times|divided|over|mod|squared|cubed|factorial|choose|and|negative|(?:less|more) than"
    r"|or (?:more|less|fewer)|half|halves|thirds?|(?:four|fif|six|seven|eigh|nin|ten|hundred|thousand)ths?"
    r"|[a-z ]*below)\b"
)
"""Words after a number that change it."""
UNIT = re.compile(
    rf"(?:(?<=[\d}}])|(?<=\\pi))(?:\s+(?!{FUNCTION}\b|{CHANGE})"
    rf"(?:{MEASURE}(?![A-Za-z])|[A-Za-z]{{3,}}[A-Za-z ./]*)"
    r"|\s*/\s*[A-Za-z]{3,}|(?:(?<=1)st|(?<=2)nd|(?<=3)rd|(?<=\d)th))$"
)
UNIT_OF_NUMBER = re.compile(rf"(?:(?<=[\d}}])|(?<=\\pi))\s*(?:{ABBREVIATION}|[mgsLh])\.?$")
"""What may be a variable too: a unit where the right answer has no letter."""
UNIT_AS_TEXT = re.compile(
    rf"(?<=[^\s{{(\[,])(?:\s*/?\\(?:text|textrm|mbox|mathrm)\s*\{{(?!\s*{CHANGE}|[^{{}}]*\s\d)[^{{}}]*\}}"
    r"(?:\^\{?-?\d\}?)?)+$"
)
UNITS = {
    name: line.split()[0]
    for line in (FOLDER / "units.txt").read_text(encoding="utf-8").splitlines()
    for name in line.split()
}
"""Units by their names, and words that differ from each other as units do."""
# The units that math-verify removes are variables as well: c, d, s, t.
EXTRACTION = LatexExtractionConfig(
    normalization_config=NormalizationConfig(malformed_operators=True, nits=True)
)
SCALES = {"dozen": 12, "hundred": 100} | {
    name: 1000**power for power, name in enumerate(("thousand", "million", "billion", "trillion"), start=1)
}
SCALE = re.compile(rf"(?<=\d)\s*(?:\\text\s*\{{\s*)?\b({'|'.join(SCALES)})\b(?!\s+and\b)[^\d{{}}]*\}}?$")
NAMES = (FOLDER / "numbers.txt").read_text(encoding="utf-8").split()
NUMBERS = dict(zip(NAMES, (*range(20), *range(20, 100, 10)), strict=True))
NUMBER = re.compile(rf"\b(?:({'|'.join(NAMES[20:])})[\s-]+)?({'|'.join(NAMES)})\b", re.IGNORECASE)
SHARES = {"half": 2, "halve": 2, "third": 3, "quarter": 4, "fourth": 4, "fifth": 5, "sixth": 6}
SHARES |= {"seventh": 7, "eighth": 8, "ninth": 9, "tenth": 10}
PART = re.compile(
    rf"(?:\b(\d+|{'|'.join(NAMES)})\s+and\s+)?(?:\b(?:an?|({'|'.join(NAMES)}))[\s-]+|(?<![\w\s-]))"
    rf"({'|'.join(SHARES)})s?\b",
    re.IGNORECASE,
)
QUANTITIES = re.compile(
    r"\\(?:text|mbox)\s*\{(?!\s*,?\s*(?:and|or)\s*\})[^{}]*[A-Za-z][^{}]*\}\s*-?\d|\d\s*['′\"]\s*\d"
    r"|\d:\d+:\d|\d:0\d|\\dots|\\b?mod\b"
)
"""No product or quotient: hours and minutes, feet and inches, times and ratios, and what is left out."""
AMOUNT = r"\\?\$?\d[\d.,/]*(?:\\?%)?"
RANGE = re.compile(
    rf"(?:[A-Za-z]\s*=\s*)?([\[(]?)({AMOUNT})\s*(?:[‒–—]|\\text\s*\{{\s*[-–—]+\s*\}})\s*({AMOUNT})([\])]?)"
    r"(?:\s+[A-Za-z]{2}[A-Za-z ]*|\s*\\text\s*\{[^{}]*\})?"
)
STYLE = re.compile(r"\\(?:text(?:bf|it|rm)?|math(?:rm|bf|it)|mbox)\s*\{([^{}]*)\}")
LOOKS = re.compile(r"\\(?:(?:boldsymbol|bm|underline|[lL]arge)\b|(?:text)?color\s*\{\w+\})|(?<!\\)\\[()]")
"""Commands that change no meaning, whatever they hold."""
ANNOUNCED = re.compile(
    r"^\s*(?:(?:the\s+)?(?:final\s+)?answer(?:\s+is|\s*:)\s*:?|approximately\b|about\b|[=≈]|\\(?:approx|sim)\b)",
    re.IGNORECASE,
)
LETTER = r"(?:\([A-Za-h]\)|\(?[A-Z]\)?)"
CHOICE = re.compile(
    rf"(?:[Oo]ptions?|[Cc]hoices?)?\s*({LETTER}(?:(?:\s|,|and|or|&)+{LETTER})*)(?:(?:[.:]|(?<=\)))(?!\s*(?:,|and\b|or\b|&))(.*))?",
    re.DOTALL,
)
"""The letters of choices, and what follows them."""
MODULUS = re.compile(
    r"(?:\\?\s)*(?:\\pmod|\(\s*(?:\\text\s*\{\s*)?\\?(?:mod|bmod)\b\s*\}?)\s*\{?\s*(\d+)\s*\}?\s*\)?$"
)
SET = re.compile(r"\s*(?:\\left\s*)?\\\{[^<>=|:]*\\\}\s*")
PAIR = re.compile(r"\s*(?:\\left\s*)?[(\[][^()\[\]]*[)\]]\s*")
BASE = re.compile(r"\d\)?\s*_\s*\{?\s*\(?(?!10\b)(\d+)")
"""The base of a number, but ten."""
AMOUNT_OF = re.compile(r"(?:[A-Za-z]\s*=)?([^A-Za-z]*)([A-Za-z][A-Za-z ./^{}²³\d-]*)?")
"""A number, and what it counts."""
DASHES = str.maketrans(dict.fromkeys("‐‑‒–—−－", "-"))
SIGNS = DASHES | str.maketrans(
    {**dict.fromkeys("€£¥₹¢", ""), **dict.fromkeys("°º", r"^\circ"), "·": r"\cdot ", "√": r"\sqrt ", "⁄": "/"}
    | {"∞": r"\infty ", "∪": r"\cup ", "∩": r"\cap ", "±": r"\pm "}
    | {sign: r"\frac{{{}}}{{{}}}".format(*NFKC(sign).split("⁄")) for sign in "¼½¾⅐⅑⅒⅓⅔⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞"}
)
COMMANDS = {r"\langle": "(", r"\rangle": ")", r"\lbrace": r"\{", r"\rbrace": r"\}", r"\equiv": "="}
COMMANDS |= {r"\varnothing": r"\emptyset", r"\ldots": r"\dots", r"\cdots": r"\dots", r"\pounds": ""}
COMMANDS |= {r"\prime": "'"}
REWRITES: tuple[tuple[str, str | Callable[[re.Match[str]], str]], ...] = (
    (r"\\[a-z]+", lambda name: COMMANDS.get(name[0], name[0])),
    (r"\\(?:mathrm|operatorname|text)\s*\{\s*(" + FUNCTION + r")\s*\}", r"\\\1 "),
    (rf"(?<![A-Za-z\\])({FUNCTION})(?=[tx-z](?![A-Za-z]))", r"\1 "),
    (r"\\[cdt]?frac(?:\s+|(?=\d))(\w)\s*(\w)", r"\\frac{\1}{\2}"),
    (r"\*\*", "^"),
    # math-verify leaves out a relation without a left side.
    (r"\A\s*(?=[<>≤≥≠]|\\(?:[lg]eq?|neq?)\b)", "x"),
    (r"\b(?:minus|negative)\s+(?=\\?[\df])", "-"),
    (r"\b(?:USD|EUR|GBP|INR|Rs\.?|US(?=\\?\$))\s*(?=[\d\\$])", ""),
    (r"(?<![A-Za-z\\])inf(?:inity)?(?![A-Za-z])", r"\\infty "),
    # Products, not mixed numbers and pairs.
    (r"((?<![_\d.])\d+|\))\s*(?=(?:\\left\s*)?\([^(),]*\))", r"\1\\cdot "),
    (r"(?<=[A-Za-z)])(?:\^\s*\{?)?(['′]+)\}?", lambda primes: f"_{{{'p' * len(primes[1])}}}"),
    (r"\{\\(?:rm|bf|it)\s+([^{}]*)\}", r"\\text{\1}"),
    (r"\\\\\s*\[[^\]]*\]", r"\\\\"),
    (r"\\log_\s*\{?\s*e\s*\}?", r"\\ln "),
    (r"\((\w+)\)\s*_", r"\1_"),
    # Units over units.
    (r"\\[dt]?frac\s*\{\s*(\\\w+\s*\{\s*[a-z]+\s*\})\s*\}\s*\{\s*(\\\w+\s*\{\s*[a-z]+\s*\})\s*\}$", r"\1/\2"),
    (r"^([^=<>]*\d)\s*=\s*([A-Za-z])$", r"\2=\1"),
    # Degrees of functions.
    (
        rf"(?<!arc)((?:{FUNCTION}|cis)\s*[({{}}\s]*)(\d[\d.]*|\\?[a-z]+)\s*\^\s*\{{?\s*\\circ\s*\}}?",
        r"\1{\\frac{\2\\pi}{180}}",
    ),
    (r"\\(?:text|mathrm|operatorname)\s*\{\s*cis\s*\}\s*(\([^()]*\)|[^\s()]+)", r"e^{i\1}"),
    (r"\\(?:mathrm|text)\s*\{\s*([ei])\s*\}", r" \1"),
    # SymPy's imaginary unit.
    (r"(?<![A-Za-z\\_])i(?![A-Za-z])", " {I}"),
    (
        r"^\\\{\s*[a-z]\s*(?:\\in\s*\\mathbb\s*\{?R\}?)?\s*(?:\\mid|[:|])(.*(?:[<>=]|\\(?:[lg]eq?|neq?|in)\b).*)\\\}$",
        r"\1",
    ),
    (r"\^\s*\{?\s*\\text\s*\{\s*(st|nd|rd|th)\s*\}\s*\}?$", r"\1"),
    (r"(?<=\d)\s*(?:\\text\s*\{\s*to\s*\}|to)\s*(?=\d)", ":"),
    # Open ends, as in ]0,1[.
    (
        r"([\[\]])([^\[\]()]+,[^\[\]()]+)(?<!\\sqrt)([\[\]])",
        lambda ends: ends[1].replace("]", "(") + ends[2] + ends[3].replace("[", ")"),
    ),
    # Temperatures and angles.
    (r"\s*(?:\\degree|\^\s*\{?\\(?:circ|degree)\}?)\s*[CF]?$", r"^\\circ"),
    (r"[⁺⁻⁰¹²³⁴-⁹]+", lambda power: f"^{{{NFKC(power[0])}}}"),
    (r"[₀-₉]+", lambda index: f"_{{{NFKC(index[0])}}}"),
    (SPACE.pattern, " "),
    # Spaces that group digits.
    (r"(?<=\d)(?:\\!|\s)+(?=\d{3}(?!\d))", ""),
    # Mixed numbers.
    (r"(?<![\w.,/^])(\d+)\s+(\d+)/(\d+)(?![\d.])", r"\1\\frac{\2}{\3}"),
    (r"(?<!\d)(\d*\.\d*?)(\d+?)\2{2,}\s*\\dots", r"\1(\2)"),
    (r"\A(-?\d*\.\d+)\s*\\dots\Z", r"\1"),
    (
        r"(?<!\d)(\d*)\.(\d*)(?:\\(?:overline|bar|dot)\s*(?:\{(\d+)\}|(\d))|\((\d+)\))",
        lambda number: _repeating(*number.groups("")),
    ),
    (rf"(?<![A-Za-z\\])({FUNCTION})(?![A-Za-z])", r"\\\1"),
    (r"\\sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}"),
    (r"(\\sqrt\s*\[[^\]]*\])\s*(\w)", r"\1{\2}"),
    (r"\\sqrt\s+(\d{2,})", r"\\sqrt{\1}"),
    (r"(?<![\w\\{])(\d+\.?\d*)[eE]([+-]?\d+)(?![\w.])", r"\1\\times 10^{\2}"),
    (r"(?<=\d)\s*[xX]\s*(?=10\s*\^)", r"\\times "),
    # A number as a text, and words without one.
    (r"\A\\(?:text|textbf|mbox|mathrm)\s*\{\s*(-?\\?\$?\d[\d.,]*(?:\s+[A-Za-z. ]+)?)\s*\}\Z", r"\1"),
    (r"\A((?i:no)|[A-Z]{2,}|[A-Za-z]{4,}|[A-Za-z]{2,}(?:[ -][A-Za-z]{2,})+)\Z", r"\\text{\1}"),
    (r"\\(angle|triangle)\s*([A-Z]+)", r"\\text{\1 \2}"),
)


def expressions(answer: str) -> list[Any]:
    """Expressions that math-verify parses from an answer. Rewritten first: a text of words (no product of
    letters), ranges, units, powers of ten by name, the notation of numbers, signs of Unicode, and a percent
    sign inside the formula."""
    text = answer.strip("*` \n").replace("...", r"\dots").replace("…", r"\dots").rstrip(" .,;\\")
    if amounts := RANGE.fullmatch(text):
        opened, *numbers, closed = amounts.groups()
        if opened != "[":
            return ["–".join(end.strip("\\$%") for end in numbers)]
        text = opened + ",".join(numbers) + closed
    text = MODULUS.sub("", text.translate(SIGNS))
    if re.search(r"\\pm(?![a-z])", text):
        text = ", ".join(text.replace(r"\pm", sign).replace(r"\mp", other) for sign, other in ("+-", "-+"))
    for pattern, new in REWRITES:
        text = re.sub(pattern, new, text)
    text, is_percent = PERCENT.subn("", text)
    if scale := SCALE.search(text):
        amount = re.sub(r"\\?\$|\{?,\}?(?=\d{3})", "", text[: scale.start()])
        text = rf"{amount}\cdot {SCALES[scale[1]]}"
    # math-verify would remove all from the first text to a unit at the end.
    if not re.search(r"[<>]|\\[lg]eq?\b", text):
        text = UNIT_AS_TEXT.sub("", UNIT.sub("", text))
    if QUANTITIES.search(text):
        return [re.sub(r"\s+", "", text)]
    parsed = parse(f"${text}$%" if is_percent else rf"\boxed{{{text}}}", (EXTRACTION,))
    return [_joined(each, text) for each in parsed]


def _joined(expression: Any, text: str) -> Any:
    """The set of numbers for a bound of an absolute value, and for inequalities in a list, which `or`
    connects where the text has it or no number meets them all. The letter E, which math-verify takes for the
    number e, gets another name."""
    parts = expression if isinstance(expression, FiniteSet) else [expression]
    if all(isinstance(each, Ge | Gt | Le | Lt) and (parts is expression or each.has(Abs)) for each in parts):
        with suppress(RuntimeError, TypeError, ValueError):
            common = None if re.search(r"\bor\b", text) else And(*parts).as_set()
            return Or(*parts).as_set() if common is None or common.is_empty else common
    return Symbol("(E)") if getattr(expression, "name", "") == "E" else expression


def _repeating(whole: str, begin: str, *period: str) -> str:
    """The fraction of a decimal number with digits that repeat."""
    digits = "".join(period)
    numerator = int(whole + begin + digits) - int("0" + whole + begin)
    return rf"\frac{{{numerator}}}{{{(10 ** len(digits) - 1) * 10 ** len(begin)}}}"


def digits(answer: str) -> str:
    """The answer with digits for numbers below 100 and parts that are words."""
    answer = PART.sub(
        lambda one: rf"{one[1] or ''}\frac{{{one[2] or 1}}}{{{SHARES[one[3].lower()]}}}", answer
    )
    return NUMBER.sub(lambda found: str(sum(NUMBERS[name.lower()] for name in found.groups("zero"))), answer)


def words(answer: str) -> str:
    """An answer, in small letters but commands and letters that stand alone, without commands of style,
    dollars, full stops, and spaces but those between digits."""
    plain = SPACE.sub(" ", STYLE.sub(r"\1", answer)).translate(DASHES)
    plain = re.sub(r"(?<![\\A-Za-z])[A-Za-z]{2,}", lambda word: word[0].lower(), plain)
    return re.sub(r"(?<!\d)\s+|\s+(?!\d)|\\?\$|\.(?!\s*\d)", "", re.sub(r"\{(.)\}", r"\1", plain))


def units(answer: str) -> set[str]:
    """The units of an amount, and the number that it is modulo; none of other answers."""
    plain = re.sub(r"\A\$(.*)\$\Z", r"\1", STYLE.sub(r"\1", answer).strip("*` \n"))
    plain = re.sub(r"\\[A-Za-z]+", " ", re.sub(r"\\(?:circ|degree)\b|º", "°", plain))
    amount, counted = found.groups("") if (found := AMOUNT_OF.fullmatch(plain)) else ("", "")
    named = re.findall(r"[A-Za-z]+|[²³]|(?<=\^)[23]|(?<=\^\{)[23]", counted.lower())
    singular = (name if name in UNITS else name.removesuffix("s") for name in named)
    signs = re.findall("[$€£¢%°]", amount)
    return {UNITS[name] for name in (*signs, *singular) if name in UNITS}.union(MODULUS.findall(answer))


def are_equal(given: str, expected: str) -> bool:
    """Whether they have the same words, or math-verify calls them equal. Numbers of different bases (`101_2`)
    or units are not."""
    given, expected = (digits(LOOKS.sub("", each)) for each in (given, expected))
    if words(given) == words(expected):
        return bool(words(given))
    own, others = units(given), units(expected)
    bases = [BASE.findall(STYLE.sub(r"\1", each)) for each in (given, expected)]
    is_other_power = own & others and (own ^ others) & {"2", "3"}
    if bases[0] != bases[1] or is_other_power or (own - others and others - own):
        return False
    if own & others or not re.search("[A-Za-z]", re.sub(r"\\[A-Za-z]+", "", expected)):
        given = UNIT_OF_NUMBER.sub("", given)
    if own & others:
        expected = UNIT_OF_NUMBER.sub("", expected)
    pair = [ANNOUNCED.sub("", each) for each in (given, expected)]
    choices = [CHOICE.fullmatch(STYLE.sub(r"\1", each).strip("*` \n$")) for each in pair]
    letters = [sorted(re.findall(r"\b[A-Z]\b", choice[1].upper())) for choice in choices if choice]
    if len(letters) == 2:
        return letters[0] == letters[1]
    given, expected = ((choice and choice[2]) or each for choice, each in zip(choices, pair, strict=True))
    # math-verify calls a pair or an interval equal to the set of its ends.
    if any(
        SET.fullmatch(one) and PAIR.fullmatch(other) for one, other in ((given, expected), (expected, given))
    ):
        return False
    found = expressions(expected), expressions(given)
    is_equal = bool(verify(*found, allow_set_relation_comp=True))
    return is_equal and not any(_are_far(*pair) for pair in zip(*found, strict=False))


def _are_far(one: Any, other: Any) -> bool:
    """Whether they are numbers that differ by more than rounding, also where math-verify, which compares
    decimal places, takes both for 0. A percent has a part that is not evaluated."""
    pair = [each for each in (one, other) if isinstance(each, Expr) and each.is_number]
    if len(pair) < 2 or any(each.has(UnevaluatedExpr) or each.is_zero for each in pair):
        return False
    gap = abs((one - other).evalf())
    return bool(gap.is_comparable and gap > MAX_GAP * abs(one.evalf()))


def main() -> None:
    """Report that it is ready, then answer until standard input ends."""
    logging.disable(logging.CRITICAL)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    print("ready", flush=True)
    # A pipe that is not read would fill.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    for line in sys.stdin:
        print(json.dumps(are_equal(*json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
