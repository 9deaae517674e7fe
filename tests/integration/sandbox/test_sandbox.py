"""Generated programs run in a sandbox that they do not leave, or not at all."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import platform
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from idlm.errors import UserError
from idlm.infer.evaluation import sandbox as module
from idlm.infer.evaluation.sandbox import Program, ProgramLimits, ProgramOutcome, Sandbox
from tests.errors import refused
from tests.integration.sandbox import escapes, escapes_inside

PARTS = (escapes, escapes_inside)
TEXT, INSIDE = (Path(str(part.__file__)).read_text(encoding="utf-8") for part in PARTS)
TEXT += INSIDE.replace("from __future__ import annotations", "")
NAMES = sorted(name for part in PARTS for name in vars(part))
ATTEMPTS = [name for name in NAMES if name.startswith("try_")]
FORGERIES = [name for name in NAMES if name.startswith("give_")]
LIMITS = ProgramLimits(seconds=60)
SHORT = ProgramLimits(seconds=1, memory=128 << 20)
SLEEP = f"98765.{os.getpid()}"


@functools.cache
def _box(limits: ProgramLimits) -> Sandbox:
    return Sandbox(limits)


def _reason() -> str | None:
    """Why there is no sandbox on this machine."""
    try:
        _box(LIMITS)
    except UserError as error:
        return error.message
    return None


NO_SANDBOX = _reason()
needs_sandbox = pytest.mark.skipif(NO_SANDBOX is not None, reason=str(NO_SANDBOX))


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Secrets, servers and processes of the host, and what the limits are."""
    folder = tmp_path_factory.mktemp("w")
    (folder / "secret").write_text("secret")
    (folder / "victim").write_text("victim")
    with contextlib.ExitStack() as stack:
        servers = [
            stack.enter_context(socket.socket(family)) for family in (socket.AF_INET, *[socket.AF_UNIX] * 2)
        ]
        for server, address in zip(
            servers, (("127.0.0.1", 0), str(folder / "s"), f"\0lmeval{os.getpid()}"), strict=True
        ):
            server.bind(address)
            server.listen(100)
        yield {
            "place": str(folder),
            "secret": str(folder / "secret"),
            "far_secret": str(Path(__file__).resolve()),
            "victim": str(folder / "victim"),
            "target": str(folder / "target"),
            "unix": str(folder / "s"),
            "abstract": f"\0lmeval{os.getpid()}",
            "port": servers[0].getsockname()[1],
            "pid": os.getpid(),
            "group": os.getpgid(0),
            "sleep": SLEEP,
            "scratch": LIMITS.scratch,
            "memory": LIMITS.memory,
            "processes": LIMITS.processes,
            "servers": servers,
        }


def _code(world: dict[str, Any]) -> str:
    """The text of the attempts, with what the host put up."""
    plain = {key: value for key, value in world.items() if key != "servers"}
    return f"{TEXT}\nWORLD.update({plain!r})\n"


def judged(
    code: str, test: str = "f()", functions: tuple[str, ...] = ("f",), limits: ProgramLimits = LIMITS
) -> ProgramOutcome:
    return _box(limits).run(Program(code=code, test=test, functions={name: name for name in functions}))


@needs_sandbox
def test_a_right_program_passes_and_a_wrong_one_says_why() -> None:
    code = "from collections import Counter\n"
    code += "def f(x, *, k=1): return Counter([x, k]), {x}, (1.5, None, b'a', 2j, 'é')"
    test = (
        "assert f(3, k=4) == ({3: 1, 4: 1}, {3}, (1.5, None, b'a', 2j, 'é'))\nassert f(2**99)[1] == {2**99}"
    )
    assert judged(code, test) == ProgramOutcome(passed=True, reason="")
    assert judged("def f(x): return x", "assert f(1) == 2, f(1)").reason == "AssertionError: 1"
    assert "ZeroDivisionError" in judged("def f(): return 1 / 0").reason
    assert "SyntaxError" in judged("def f(:").reason
    assert "has no attribute 'f'" in judged("").reason


@needs_sandbox
def test_objects_stay_in_the_program_and_come_back_as_they_were() -> None:
    code = "class P:\n    def __init__(self, x): self.x = x\ndef total(ps): return sum(p.x for p in ps)"
    assert judged(code, "assert total([P(1), P(2)]) == 3", ("P", "total")).passed
    tree = "p = P(P(1))\np.x.x = 5\nassert total([p.x]) == p.x.x == 5"
    assert judged(code, tree, ("P", "total")).passed
    assert "'P' object has no attribute 'y'" in judged(code, "P(1).y", ("P",)).reason


@needs_sandbox
def test_attempts_succeed_outside_and_not_inside(world: dict[str, Any]) -> None:
    assert len(ATTEMPTS) + len(FORGERIES) >= 50
    run = "import json\n_r = {}\nfor _n in OUTSIDE:\n    try: _r[_n] = bool(globals()[_n]())\n"
    run += "    except BaseException as e: _r[_n] = repr(e)\nprint(json.dumps(_r))"
    outside = subprocess.run(
        [sys.executable, "-c", f"{_code(world | {'is_outside': True})}\n{run}"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        env={**os.environ, "LMEVAL_SECRET": "secret"},
    )
    reached = json.loads(outside.stdout)
    assert sorted(reached) == escapes.OUTSIDE
    assert not {name: result for name, result in reached.items() if result is not True}
    (Path(world["place"]) / "victim").write_text("victim")
    (Path(world["place"]) / "target").unlink()
    drained = _drain(world["servers"])
    assert drained >= 3

    test = "escaped = {}\nfor name in names():\n    try:\n        reached = globals()[name]()\n"
    test += "        if reached: escaped[name] = reached\n    except Exception as error:\n"
    test += "        assert 'the program' not in str(error), name\nassert not escaped, escaped"
    code = f"{_code(world)}\ndef names(): return {ATTEMPTS!r}\n"
    outcome = judged(code, test, ("names", *ATTEMPTS))
    assert outcome == ProgramOutcome(passed=True, reason="")
    assert (Path(world["place"]) / "victim").read_text() == "victim"
    assert not (Path(world["place"]) / "target").exists()
    assert _drain(world["servers"]) == 0
    assert SLEEP not in _command_lines()


def _drain(servers: list[socket.socket]) -> int:
    """Number of connections that wait."""
    found = 0
    for server in servers:
        server.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                server.accept()[0].close()
                found += 1
    return found


def _command_lines() -> str:
    texts = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            texts.append(path.read_text(errors="replace"))
    return "\n".join(texts)


@pytest.mark.sweep
@needs_sandbox
def test_no_verdict_can_be_forged(world: dict[str, Any]) -> None:
    code = _code(world)
    programs = [
        Program(code=code, test="got = f()\nassert got == 7 or got == [7, {'a': 7}]", functions={"f": name})
        for name in FORGERIES
    ]
    with ThreadPoolExecutor(2) as pool:
        outcomes = dict(zip(FORGERIES, pool.map(_box(LIMITS).run, programs), strict=True))
    assert not {name: each for name, each in outcomes.items() if each.passed}


ENDS = """
# exit status 0
def f(): os._exit(0)
# exit at import
raise SystemExit(0)
# exit status 0 at import
os._exit(0)
# killed by itself
def f(): os.kill(os.getpid(), 9)
# closed descriptors
def f(): os.closerange(0, 100)
# infinite loop
def f():
    while True: pass
# infinite loop at import
while True: pass
# sleep
def f(): time.sleep(1000)
# deaf to signals
for n in {*range(1, 65)} - {9, 19, 32, 33}: signal.signal(n, signal.SIG_IGN)
def f():
    while True: time.sleep(1)
# regular expression
def f(): re.match(r'(a+)+$', 'a' * 40 + 'b')
# fork bomb
def f():
    while True:
        try: os.fork()
        except OSError: pass
# memory of children
def f():
    for _ in range(9):
        try: os.fork()
        except OSError: pass
    held = []
    while True:
        try: held.append(bytearray(1 << 24))
        except MemoryError: held = []
# huge answer
def f(): return 'x' * (1 << 22)
# deep answer
def f():
    x = []
    for _ in range(100000): x = [x]
    return x
# endless answer
def f(): return itertools.count()
# endless line
def f():
    for n in range(3, 30):
        try:
            while True: os.write(n, b'x' * 65536)
        except OSError: pass
# forged result
for n in range(3, 30):
    try: os.write(n, b'{"value": 7}\\n' * 3 + b'nonsense\\n')
    except OSError: pass
os._exit(0)
# recursion
def f(): return f()
"""
IMPORTS = "import itertools, os, re, signal, sys, time\n"


@pytest.mark.sweep
@needs_sandbox
def test_what_does_not_end_well_fails() -> None:
    codes = dict(part.split("\n", 1) for part in ENDS.lstrip("\n# ").split("\n# "))
    assert len(codes) >= 18
    with ThreadPoolExecutor(2) as pool:
        done = pool.map(lambda code: judged(IMPORTS + code, "assert f() == 9", limits=SHORT), codes.values())
        outcomes = dict(zip(codes, done, strict=True))
    assert not {name: each for name, each in outcomes.items() if each.passed or not each.reason}
    assert "no result after 1 s" in outcomes["infinite loop"].reason


@needs_sandbox
def test_output_goes_nowhere_and_does_not_fail_a_program() -> None:
    code = (
        "def f():\n    for _ in range(200): print('x' * 100000); sys.stderr.write('y' * 100000)\n    return 1"
    )
    assert judged(IMPORTS + code, "assert f() == 1").passed


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [("release", "5.4.0-generic", "5.4.0-generic"), ("machine", "aarch64", "x86-64")],
)
def test_systems_that_it_does_not_know_are_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, words: str
) -> None:
    monkeypatch.setattr(platform, name, lambda: value)
    refused(f"IDLM-0480: .*{words}", Sandbox)


def test_where_the_kernel_refuses_no_program_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The child runs where a filter denies `unshare`, as in a container."""
    folder = module.CHILD.parent
    monkeypatch.setattr(module, "CHILD", tmp_path / "child.py")
    (tmp_path / "child.py").write_text(
        f"import sys, errno\nsys.path.insert(0, {str(folder)!r})\n"
        "import sandbox_namespaces as n, sandbox_child\n"
        "def refuse():\n    raise OSError(errno.EPERM, 'unshare: Operation not permitted')\n"
        "n.enter_namespaces = refuse\nsandbox_child.main()\n"
    )
    marker = tmp_path / "ran"
    with pytest.raises(UserError, match="IDLM-0480: .*unshare: Operation not permitted") as caught:
        Sandbox().run(Program(code=f"open({str(marker)!r}, 'w')", test="", functions={}))
    assert "user namespaces" in caught.value.fix
    assert not marker.exists()
