"""What is installed and from where (the package and its extras), and what the Makefile's targets cover."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from idlm.config import project
from tests.repo.files import ROOT, listed, python_files, text_of

PROJECT = tomllib.loads(text_of("pyproject.toml"))["project"]
PACKAGED = ("idlm", "train", "infer", "kernels", "conf", "recipes")
LINKED = ("train", "infer", "kernels", "conf")


def run(code: str, *arguments: object, cwd: Path, **environment: str) -> str:
    """Output of a Python program that gets none of this process's import paths."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    command = [sys.executable, *map(str, arguments), "-c", code]
    environment = inherited | {"PYTHONDONTWRITEBYTECODE": "1"} | environment
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what is packaged, in a folder called idlm; its links stay links."""
    folder = tmp_path_factory.mktemp("above") / "idlm"
    junk = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in (*PACKAGED, "src"):
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=junk)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    return folder


def build(kind: str, clone: Path, folder: Path) -> zipfile.ZipFile:
    """The wheel that pip would install: `kind` is build_wheel or build_editable."""
    run(f"from setuptools import build_meta; build_meta.{kind}({str(folder)!r})", cwd=clone)
    [wheel] = folder.glob("*.whl")
    return zipfile.ZipFile(wheel)


@pytest.mark.sweep
def test_an_editable_install_imports_from_above_a_clone_called_idlm(clone: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    build("build_editable", clone, tmp_path).extractall(site)
    code = (
        f"import site; site.addsitedir({str(site)!r}); import idlm, importlib.util as u;"
        "assert 'Engine' in idlm.__all__;"
        f"assert all(u.find_spec('idlm.' + name) for name in {LINKED});"
        "print(idlm.__file__)"
    )
    # -S: without the environment's own install of idlm.
    found = run(code, "-S", cwd=clone.parent)
    assert Path(found).resolve() == clone / "idlm" / "__init__.py"


def test_without_installation_it_imports_from_above_and_from_within(clone: Path) -> None:
    for cwd in (clone.parent, clone):
        found = run("import idlm; print(idlm.__file__)", "-S", cwd=cwd, PYTHONPATH=str(clone))
        assert Path(found) == clone / "idlm" / "__init__.py"


@pytest.fixture(scope="module")
def wheel(clone: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(str(build("build_wheel", clone, tmp_path_factory.mktemp("wheel")).filename))


@pytest.mark.sweep
def test_a_wheel_runs_in_a_new_environment(wheel: Path) -> None:
    command = [ROOT / ".ci" / "check-wheel", wheel, sys.executable]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    programs = sum(name.startswith("idlm-") for name in PROJECT["scripts"])
    assert f": {programs + 1} programs; " in done.stdout


@pytest.mark.sweep
def test_a_wheel_holds_every_tracked_file_of_the_package_and_nothing_else(wheel: Path) -> None:
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    files = {name for name in listed(*PACKAGED) if (ROOT / name).is_file()}
    recipes = {
        f"idlm/conf/recipe/{name.removeprefix('recipes/')}" for name in files if name[:8] == "recipes/"
    }
    linked = {f"idlm/{name}" for name in files if name.split("/")[0] in LINKED}
    assert names == recipes | linked | {name for name in files if name.startswith("idlm/")}


def packages(extra: str | None) -> set[str]:
    lines = PROJECT["dependencies"] if extra is None else PROJECT["optional-dependencies"][extra]
    return {Requirement(line).name for line in lines}


def test_peft_is_needed_by_tests_alone() -> None:
    assert "peft" not in packages(None)
    assert "peft" in packages("dev")
    sources = map(text_of, python_files(*PACKAGED, "benchmarks"))
    assert not [text for text in sources if re.search(r"^\s*(from|import) peft\b", text, re.M)]


def test_the_image_the_extras_and_the_pages_allow_the_same_versions() -> None:
    extras = {
        name: {Requirement(line).name: line for line in lines}
        for name, lines in PROJECT["optional-dependencies"].items()
    }
    for name in ("triton", "deepspeed"):
        assert extras["gpu"][name] == extras["dev"][name]
    [torch] = [Requirement(line) for line in PROJECT["dependencies"] if Requirement(line).name == "torch"]
    [image] = re.findall(r"'torch==([\d.]+)\.\*'", (ROOT / "Dockerfile").read_text(encoding="utf-8"))
    assert torch.specifier.contains(image)
    contributing = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    for title, wanted in (("torch", torch), ("Triton", Requirement(extras["gpu"]["triton"]))):
        first, below = (Version(part.version) for part in sorted(wanted.specifier, key=str, reverse=True))
        assert f"{title} {first} to {below.major}.{below.minor - 1} " in contributing


def test_flash_attention_4_is_an_extra_at_tested_versions() -> None:
    assert "flash-attn-4" in packages("flash-attn")
    assert not packages("flash-attn") & (packages(None) | packages("dev") | packages("gpu"))
    for line in PROJECT["optional-dependencies"]["flash-attn"]:
        assert [part.operator for part in Requirement(line).specifier] == ["=="], line


def test_every_extra_that_a_message_or_a_page_names_exists() -> None:
    names = (*python_files(*PACKAGED, "benchmarks"), "README.md", "CONTRIBUTING.md", "Makefile")
    texts = map(text_of, names)
    named = re.findall(r"(?:idlm|'\.)\[([\w,-]+)\]'|install_command\('([\w-]+)'\)", "\n".join(texts))
    found = {name for pair in named for name in "".join(pair).split(",")}
    assert {"gpu", "flash-attn", "serve", "math", "eval", "dev"} <= found
    assert found <= set(PROJECT["optional-dependencies"])


def test_grading_and_configuration_need_the_same_antlr() -> None:
    [own] = [line for line in PROJECT["optional-dependencies"]["math"] if line.startswith("antlr4")]
    wanted = [line for line in metadata.requires("hydra-core") or () if line.startswith("antlr4")]
    installed = metadata.version("antlr4-python3-runtime")
    assert wanted and all(Requirement(line).specifier.contains(installed) for line in [own, *wanted])
    [harness] = [line for line in PROJECT["optional-dependencies"]["eval"] if line.startswith("lm-eval")]
    assert "math" not in Requirement(harness).extras, "it needs another version"


def test_a_fix_installs_an_extra_from_the_clone_or_its_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    assert project.install_command("serve") == f"pip install -e '{ROOT}[serve]'"
    extras = ("serve", "structured", "math")
    lines = [
        f"{line}; extra == {extra!r}" for extra in extras for line in PROJECT["optional-dependencies"][extra]
    ]
    monkeypatch.setattr(project, "ROOT", ROOT / "tests")
    monkeypatch.setattr(project.metadata, "requires", lambda name: [*PROJECT["dependencies"], *lines])
    packages = shlex.split(project.install_command("serve"))
    assert packages[:2] == ["pip", "install"]
    names = {Requirement(package).name for package in packages[2:]}
    assert {"fastapi", "uvicorn", "llguidance"} <= names and not names & {"idlm", "torch", "math-verify"}


PARTS = sorted(path.name for path in (ROOT / "tests" / "gpu").iterdir() if list(path.glob("test_*.py")))


def recipe(*arguments: str) -> str:
    """What `make` would run."""
    command = ["make", "--dry-run", "--no-print-directory", "-C", str(ROOT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_every_gpu_test_is_in_a_part_that_make_knows() -> None:
    assert len(PARTS) >= 2 and not list(ROOT.glob("tests/gpu/test_*.py"))
    for part in PARTS:
        assert recipe("gpu-test", f"PART={part}").rstrip().endswith(f"tests/gpu/{part}")
        assert f"PART={part}" in text_of("CONTRIBUTING.md")

    for unknown in ([], ["PART=everything"]):
        command = ["make", "-C", str(ROOT), "gpu-test", *unknown]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode != 0 and all(f"PART={part}" in done.stdout for part in PARTS)


@pytest.mark.sweep
def test_gpu_tests_are_importable_without_a_gpu() -> None:
    """They share cases with tests that run here."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--collect-only", "-m", "gpu"]
    done = subprocess.run([*command, "tests/gpu"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:]


def test_imports_are_compiled_once() -> None:
    """pip does not compile them, and an environment may ask Python not to keep what it compiled."""
    shown = "shown:; @echo bytecode=$$PYTHONDONTWRITEBYTECODE."
    command = ["make", "-C", str(ROOT), "--eval", shown, "shown"]
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert "bytecode=." in done.stdout.splitlines()


def test_choices_are_compared_on_two_instruction_sets() -> None:
    """A choice that hangs on rounding differs between them."""
    marked = {name for name in python_files("tests") if "mark.decides\n" in text_of(name)}
    assert "tests/contracts/block/test_block_traps.py" in marked and len(marked) >= 15
    [line] = [one for one in recipe("test-all").splitlines() if one.startswith("ATEN_CPU_CAPABILITY=default")]
    assert {name for name in line.split() if name.endswith(".py")} == marked


def test_both_commands_run_each_test_once() -> None:
    lines = [line for line in recipe("test", "test-all").splitlines() if " -m pytest " in line]
    chosen = [re.search(r'-m "([^"]*)"', line) for line in lines]
    rest = "not gpu and not multigpu"
    assert [found and found.group(1) for found in chosen] == [
        f"not sweep and {rest}",
        f"sweep and not decides and {rest}",
        f"decides and {rest}",
    ]
    assert recipe("test-all") == recipe("test", "test-all"), "a newcomer needs one command"
    alone = "-m 'not gpu and not multigpu and not sweep'\""
    assert alone in text_of("pyproject.toml"), "pytest alone is what `make test` runs"
    assert text_of(".ci/run").rstrip().endswith("exec make test-all")
