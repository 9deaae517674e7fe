"""What passes between a generated program and its test: results, arguments that it changes, exceptions."""

from __future__ import annotations

from idlm.infer.evaluation.sandbox import ProgramLimits, ProgramOutcome
from tests.integration.sandbox.test_sandbox import judged, needs_sandbox

VALUES = """
{'a': 1}.keys()
{'a': [1]}.items()
sorted({3: 1, 2: 0}.values())
collections.deque([1, 2], maxlen=2)
Decimal('1.10')
Fraction(-3, 4)
datetime.date(2024, 2, 29)
datetime.datetime(2024, 2, 29, 12, 30, 1, 5)
datetime.timedelta(days=-1, seconds=3)
array.array('d', [1.5])
memoryview(b'ab')
bytearray(b'ab')
collections.OrderedDict(b=1, a=2)
types.MappingProxyType({'a': [1]})
collections.ChainMap({'a': 1}, {'b': 2})
collections.UserList([1, (2,)])
enum.Enum('Text', {'A': 'x'}, type=str).A
collections.defaultdict(list, {(1, 2): [Decimal(1)]})
collections.namedtuple('P', 'x y')(1, 2)
frozenset({Fraction(1, 2), 2})
[{1: (2, [3.5, None])}, {4}, 2j, True]
"""
CHANGES = """
x = [3, 1, 2] | x.sort()
x = [1] | x.append([2])
x = [[1, 2], [3]] | x[0].pop()
x = [[1], [2]] | x[0].extend(x[1])
x = [[0] * 2 for _ in range(2)] | x[1][0] = 7
x = {'a': 1} | x.update(b=2)
x = {'a': 1} | del x['a']
x = {1, 2} | x.add(3)
x = collections.deque([1, 2]) | x.appendleft(0)
x = bytearray(b'ab') | x[0] = 99
x = collections.Counter('ab') | x.update('b')
x = collections.defaultdict(int) | x[3] = 1
x = collections.OrderedDict(b=1, a=2) | x.move_to_end('b')
x = ([1], {}) | x[1][2] = x[0].pop()
x = [1, 2] | x.pop(); raise KeyError(3)
"""
RAISED = """
ValueError('a')
KeyError('k')
AssertionError('no')
OverflowError(34, 'b')
RecursionError('deep')
StopIteration(3)
OSError(2, 'gone')
UnicodeDecodeError('utf-8', b'x', 0, 1, 'bad')
MemoryError()
LookupError((1, 2))
json.JSONDecodeError('bad', 'doc', 0)
decimal.InvalidOperation([1])
"""
LIBRARIES = (
    "import array, collections, copy, datetime, enum, types\n"
    "from decimal import Decimal\nfrom fractions import Fraction\n"
)


def _lines(text: str) -> list[str]:
    found = text.strip().splitlines()
    assert len(found) >= 11
    return found


@needs_sandbox
def test_results_of_the_standard_library_are_equal_to_themselves() -> None:
    lines = _lines(VALUES)
    code = f"{LIBRARIES}\nimport sys\nsys.setrecursionlimit(500)\ndef f(n): return [{', '.join(lines)}][n]"
    test = f"{LIBRARIES}\nfor n, x in enumerate([{', '.join(lines)}]):\n    assert f(n) == x, (n, f(n))\n"
    test += "assert isinstance(f(3), collections.deque) and str(f(4)) == '1.10'\n"
    test += "assert list(f(1)) == [('a', [1])] and set(f(0)) == {'a'}"
    assert judged(code, test) == ProgramOutcome(passed=True, reason="")


@needs_sandbox
def test_arguments_that_a_program_changes_are_changed_in_the_test() -> None:
    code, test = LIBRARIES, LIBRARIES
    for number, (given, change) in enumerate(line.split(" | ") for line in _lines(CHANGES)):
        code += f"def f{number}(x):\n    {change}\n"
        test += f"def local(x):\n    {change}\n{given}\nheld, twin = x, copy.deepcopy(x)\n"
        test += f"for call in (f{number}, local):\n    try: call(x if call is not local else twin)\n"
        test += f"    except KeyError: pass\nassert x == twin and x is held, ({number}, x, twin)\n"
    names = tuple(f"f{number}" for number in range(len(_lines(CHANGES))))
    assert judged(code, test, names) == ProgramOutcome(passed=True, reason="")


@needs_sandbox
def test_exceptions_that_a_test_expects_are_raised_there() -> None:
    lines = _lines(RAISED)
    modules = "import decimal, json\n"
    code = f"{modules}class Own(ValueError): pass\ndef f(n): raise [{', '.join(lines)}, Own('own')][n]"
    test = f"{modules}for n, x in enumerate([{', '.join(lines)}, ValueError('own')]):\n    try: f(n)\n"
    test += "    except Exception as e: assert type(e) is type(x) and e.args == x.args, (n, e)\n"
    test += "    else: assert False, n\n"
    assert judged(code, test) == ProgramOutcome(passed=True, reason="")
    assert judged(code, f"f({len(lines)})").reason == "Own: own"
    swallowed = "try: f()\nexcept Exception: pass\nassert True"
    assert "the program ended" in judged("import os\ndef f(): os._exit(0)", swallowed).reason
    assert judged("def f(): raise SystemExit(0)", swallowed).reason == "SystemExit: 0"


ITERATORS = """
list(f([iter([1, 4]), iter([2, 3])])) == [1, 4, 2, 3] | return [i for each in x for i in each]
f(iter('abc')) == ['a', 'b', 'c'] | return list(x)
next(f(iter([1, 2]))) == 2 | next(x); return x
[*itertools.islice(f(2), 3)] == [2, 4, 6] | return (x * n for n in itertools.count(1))
list(f(map(f0, [[[1], [2]], [[3]]]))) == [[1, 2], [3]] | return x
(lambda g: (next(g), next(g), [*g]))(f([1, 2, 3])) == (1, 2, [3]) | yield from x
[*f(iter([[1], [2]]))] == [[1, 1], [2, 2]] | return ([*each, *each] for each in x)
(lambda g: (f(g), next(g)))(f(3)) == (0, 1) | return next(x) if x != 3 else (i for i in range(x))
sorted(f(iter([2, 1]))) == [1, 2] | return filter(None, x)
[*zip(f([1, 2]), f([3]))] == [(1, 3)] | return map(abs, x)
next(f([]), None) is None | return iter(x)
"""


@needs_sandbox
def test_iterators_of_a_program_are_read_where_they_are() -> None:
    code, test, names = "import itertools\n", "import itertools\n", list[str]()
    for number, (sent, body) in enumerate(line.split(" | ") for line in _lines(ITERATORS)):
        names.append(f"f{number}")
        code += f"def f{number}(x):\n    {body}\n"
        test += f"f = f{number}\nassert {sent}, {number}\n"
    assert judged(code, test, tuple(names)) == ProgramOutcome(passed=True, reason="")


@needs_sandbox
def test_iterators_raise_where_they_are_read_and_end_in_time() -> None:
    code = "def g(): yield 1; raise ValueError('late')\n"
    test = "read = g()\nassert next(read) == 1\ntry: next(read)\nexcept ValueError as e: assert e.args\n"
    test += "else: assert False\nassert next(read, None) is None"
    assert judged(code, test, ("g",)) == ProgramOutcome(passed=True, reason="")
    endless = "def f(x): return sum(x)"
    assert (
        "no result after"
        in judged(endless, "import itertools; f(itertools.count())", limits=ProgramLimits(seconds=1)).reason
    )
