"""`idlm doctor`: faults of installations, each of which it finds, with a fix; and none where all is well."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from idlm.config import compose
from idlm.config.project import ROOT
from idlm.infer.doctor import installation, law, machine
from idlm.infer.doctor.command import DoctorConfig, doctor, self_test
from idlm.infer.doctor.command import _findings as findings
from idlm.infer.doctor.installation import NOTE, OK, PROBLEM, Finding
from tests.errors import refused
from tests.law.faults import FAULTS as LAW_FAULTS

CHECKS = DoctorConfig(test=False)
CPU = torch.device("cpu")
Plant = Callable[[pytest.MonkeyPatch, Path], None]


class Fault(NamedTuple):
    """How it is planted; the name, a part of the text and a part of the fix of what must be found."""

    plant: Plant
    name: str
    text: str
    fix: str
    extras: tuple[str, ...] = ()


def has_gpus(patch: pytest.MonkeyPatch, number: int = 1, cuda: str | None = "12.8") -> None:
    """Torch sees H100s (none: there is a driver, too)."""
    patch.setattr(torch.version, "cuda", cuda)
    patch.setattr(machine, "driver", lambda: (12, 8, 0))
    values = {"is_available": number > 0, "device_count": number, "get_device_name": "NVIDIA H100"}
    for name, value in {**values, "get_device_capability": (9, 0)}.items():
        patch.setattr(torch.cuda, name, lambda *_, value=value: value)


def installed(name: str, version: str) -> Plant:
    """Another version of a package lies before the installed one on the import path."""

    def plant(patch: pytest.MonkeyPatch, folder: Path) -> None:
        info = folder / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")
        patch.syspath_prepend(str(folder))

    return plant


def lacks(*names: str) -> Plant:
    """Packages are not installed."""

    def plant(patch: pytest.MonkeyPatch, folder: Path) -> None:
        known = metadata.version

        def version(name: str) -> str:
            if name in names:
                raise metadata.PackageNotFoundError(name)
            return known(name)

        patch.setattr(metadata, "version", version)

    return plant


def without_triton(patch: pytest.MonkeyPatch, folder: Path) -> None:
    has_gpus(patch)
    patch.setitem(sys.modules, "triton", None)


def without_compiler(patch: pytest.MonkeyPatch, folder: Path) -> None:
    has_gpus(patch)
    patch.setenv("PATH", str(folder))
    patch.delenv("CC", raising=False)


def without_headers(patch: pytest.MonkeyPatch, folder: Path) -> None:
    has_gpus(patch)
    patch.setattr(machine.shutil, "which", lambda name: f"/usr/bin/{name}")
    patch.setattr(machine.sysconfig, "get_path", lambda name: str(folder))


def cpu_torch_with_a_driver(patch: pytest.MonkeyPatch, folder: Path) -> None:
    has_gpus(patch, 0, cuda=None)


def cpu_torch_with_an_old_driver(patch: pytest.MonkeyPatch, folder: Path) -> None:
    cpu_torch_with_a_driver(patch, folder)
    patch.setattr(machine, "driver", lambda: (11, 8, 0))


def old_driver(patch: pytest.MonkeyPatch, folder: Path) -> None:
    has_gpus(patch, 0, cuda="13.0")


def driver_that_fails(patch: pytest.MonkeyPatch, folder: Path) -> None:
    has_gpus(patch, 0)
    patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def unwritable(variable: str) -> Plant:
    """A variable names a folder below a file."""

    def plant(patch: pytest.MonkeyPatch, folder: Path) -> None:
        (folder / "file").touch()
        patch.delenv("HF_HUB_CACHE", raising=False)
        patch.setenv(variable, str(folder / "file" / "below"))

    return plant


def noexec(patch: pytest.MonkeyPatch, folder: Path) -> None:
    known = os.statvfs(folder)
    values = {name: getattr(known, name) for name in dir(known) if name.startswith("f_")}
    mounted = SimpleNamespace(**{**values, "f_flag": os.ST_NOEXEC})
    patch.setattr(os, "statvfs", lambda path: mounted)


def full_disk(patch: pytest.MonkeyPatch, folder: Path) -> None:
    patch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=5 << 20))


def small_shared_memory(patch: pytest.MonkeyPatch, folder: Path) -> None:
    has_gpus(patch, 2)
    known = shutil.disk_usage
    small = SimpleNamespace(free=64 << 20)
    patch.setattr(shutil, "disk_usage", lambda path: small if path == "/dev/shm" else known(path))


def shadowed(patch: pytest.MonkeyPatch, folder: Path) -> None:
    patch.setattr(installation, "_origin", lambda distribution: folder)


def another_numpy(patch: pytest.MonkeyPatch, folder: Path) -> None:
    import numpy

    patch.setattr(numpy, "__version__", "1.0")


def broken_library(patch: pytest.MonkeyPatch, folder: Path) -> None:
    patch.setitem(sys.modules, "tokenizers", None)


def other_antlr(patch: pytest.MonkeyPatch, folder: Path) -> None:
    def parse_value(key: str, text: str) -> None:
        raise Exception("Could not deserialize ATN with version 3 (expected 4).")

    patch.setattr(compose, "parse_value", parse_value)


UVICORN = ("uvicorn",)
SERVE = (*UVICORN, "fastapi", "httpx-sse", "msgpack", "prometheus-client")
FAULTS = {
    "triton is missing": Fault(without_triton, "triton", "cannot be imported", "[gpu]"),
    "triton is too old": Fault(
        installed("triton", "3.1.0"), "triton", "3.1.0, allowed", "pip install 'triton"
    ),
    "transformers is too old": Fault(
        installed("transformers", "4.57.1"), "transformers", "4.57.1, allowed", "pip install 'transformers<6"
    ),
    "two versions": Fault(installed("idlm", "0.0.1"), "idlm", "several versions", "pip uninstall idlm"),
    "deepspeed is too new": Fault(installed("deepspeed", "0.21.0"), "deepspeed", "0.21.0", "'deepspeed<0.20"),
    "no compiler": Fault(without_compiler, "compiler", "no C compiler", "apt install gcc"),
    "no headers": Fault(without_headers, "compiler", "Python.h", "python3-dev"),
    "torch for CPUs": Fault(cpu_torch_with_a_driver, "GPU", "has no CUDA", "'torch<2.14,>=2.11' --index-url"),
    "torch for CPUs, old driver": Fault(
        cpu_torch_with_an_old_driver, "GPU", "has no CUDA", "newer NVIDIA driver, then pip install"
    ),
    "old driver": Fault(old_driver, "GPU", "driver is for CUDA 12.8, torch for 13.0", "newer NVIDIA driver"),
    "driver that fails": Fault(driver_that_fails, "GPU", "torch sees none", "nvidia-smi"),
    "incomplete extra": Fault(lacks(*UVICORN), "extra serve", "lacks uvicorn", "[serve]"),
    "missing extra": Fault(lacks(*SERVE), "extra serve", "uvicorn", "[serve]", ("serve",)),
    "nested extra": Fault(lacks("llguidance"), "extra serve", "lacks llguidance", "[serve]", ("serve",)),
    "missing package": Fault(lacks("rich"), "idlm", "lacks rich", "pip install 'rich>="),
    "HF cache": Fault(unwritable("HF_HOME"), "HF cache", "cannot be written", "HF_HOME"),
    "temporary files": Fault(unwritable("TMPDIR"), "temporary files", "cannot be written", "TMPDIR"),
    "noexec": Fault(noexec, "temporary files", "noexec", "TMPDIR"),
    "full disk": Fault(full_disk, "temporary files", "5 MiB free", "TMPDIR"),
    "shared memory": Fault(small_shared_memory, "shared memory", "64 MiB free, too little", "--shm-size"),
    "shadowing checkout": Fault(shadowed, "idlm", f"imported from {ROOT}, but installed", "unset PYTHONPATH"),
    "shadowing library": Fault(another_numpy, "numpy", "1.0 comes from", "unset PYTHONPATH"),
    "broken library": Fault(broken_library, "tokenizers", "cannot be imported", "--force-reinstall"),
    "other antlr": Fault(other_antlr, "hydra", "deserialize ATN", "antlr4-python3-runtime"),
}


@pytest.fixture(autouse=True)
def healthy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A worktree may not be the clone that is installed, and a GPU of this machine must not matter."""
    monkeypatch.setattr(installation, "_origin", lambda distribution: ROOT)
    monkeypatch.setattr(machine, "driver", lambda: None)
    monkeypatch.setenv("HF_HOME", str(tmp_path))


def problems(config: DoctorConfig) -> list[Finding]:
    return [one for one in findings(config) if one.status == PROBLEM]


def test_a_good_installation_has_no_problem() -> None:
    found = list(findings(CHECKS))
    assert not [one for one in found if one.status == PROBLEM]
    assert all(one.fix for one in found if one.status == NOTE)
    named = {one.name: one.text for one in found if one.status == OK}
    assert {"torch", "transformers", "idlm", "attention", "linears", "sampling", "graphs"} <= named.keys()
    assert named["attention"].startswith("torch, for torch.float32 on cpu (triton: needs a CUDA device")


def test_a_good_machine_with_gpus_has_no_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    has_gpus(monkeypatch, 2)
    monkeypatch.setattr(machine.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(Path, "is_file", lambda path: True)
    named = {one.name: one for one in machine_of(CHECKS)}
    assert not [one for one in named.values() if one.status == PROBLEM]
    assert named["GPU"].text == "NVIDIA H100, NVIDIA H100; driver for CUDA 12.8, torch for CUDA 12.8"
    assert named["graphs"].text == "CUDA graphs" and named["sampling"].text == "Triton"
    assert named["linears"].text == "Gluon for few rows, cuBLAS for many"
    assert named["training attention"].text.startswith("idlm_split, for torch.bfloat16")


def machine_of(config: DoctorConfig) -> list[Finding]:
    from idlm.infer.doctor.command import _machine

    return list(_machine(config))


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_each_fault_is_found_with_a_fix(
    fault: Fault, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fault.plant(monkeypatch, tmp_path)
    found = problems(DoctorConfig(test=False, extras=[*fault.extras]))
    same = [
        one for one in found if one.name == fault.name and fault.text in one.text and fault.fix in one.fix
    ]
    assert same, found


def test_what_is_optional_is_a_note(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    lacks(*SERVE)(monkeypatch, tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    has_gpus(monkeypatch, 0)
    monkeypatch.setattr(machine, "driver", lambda: (12, 8, machine.NO_DEVICE))
    installed("rich", "14.0.0")(monkeypatch, tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        found = {one.name: one for one in findings(DoctorConfig(test=False, port=port))}
    for name, fix in (
        ("extra serve", "[serve]"),
        ("GPU", "unset it"),
        ("port", "another port"),
        ("rich", "uninstall rich"),
    ):
        assert found[name].status == NOTE and fix in found[name].fix, found[name]


def test_the_law_holds_on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(law, "NUM_REQUESTS", 8)
    [found] = self_test(CPU)
    assert found.status == OK and "samples of both have the model's law" in found.text


def drafts_that_are_all_accepted(patch: pytest.MonkeyPatch) -> None:
    from idlm.infer.decoders import isd

    verify = isd.verify

    def broken(*args: Any, uniforms_BJ: torch.Tensor, **kwargs: Any) -> Any:
        return verify(*args, uniforms_BJ=torch.zeros_like(uniforms_BJ), **kwargs)

    patch.setattr(isd, "verify", broken)


def flat_attention(*decoders: str) -> Callable[[pytest.MonkeyPatch], None]:
    """Attention computes half of the scores, for some decoders."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        from idlm.infer.engine import Engine
        from idlm.kernels.paged_attention import plain

        load, run, loaded = Engine.from_pretrained, plain.run, [""]

        def watched(path: str, decoder: str, **options: Any) -> Engine:
            loaded.append(decoder)
            return load(path, decoder, **options)

        def broken(q_RNH: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            return run(q_RNH / 2 if loaded[-1] in decoders else q_RNH, *args, **kwargs)

        patch.setattr(Engine, "from_pretrained", watched)
        patch.setattr(plain, "run", broken)

    return plant


WRONG: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], tuple[str, ...]]] = {
    "drafts": (drafts_that_are_all_accepted, ("samples of isd",)),
    "attention": (flat_attention("ar", "isd"), ("samples of ar", "samples of isd")),
    "attention of isd": (flat_attention("isd"), ("greedy tokens of isd", "samples of isd")),
    **{fault.name: (fault.plant, ("samples of isd",)) for fault in LAW_FAULTS[:1]},
}


@pytest.mark.sweep_but(1)
@pytest.mark.parametrize("kind", WRONG)
def test_a_kernel_whose_law_is_wrong_is_found(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(law, "NUM_REQUESTS", 8)
    plant, words = WRONG[kind]
    plant(monkeypatch)
    found = list(self_test(CPU))
    assert {one.status for one in found} == {PROBLEM}
    assert len(found) == len(words) and all(word in one.text for word, one in zip(words, found, strict=True))


def test_settings_with_which_the_law_holds_are_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = "the samples are wrong"
    monkeypatch.setattr(law, "problems", lambda device, **settings: iter([] if settings else [wrong]))
    [one] = self_test(torch.device("cuda"))
    assert one.status == PROBLEM and one.text == wrong and "attention=torch graphs=off" in one.fix
    monkeypatch.setattr(law, "problems", lambda device, **settings: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        next(self_test(CPU))
    monkeypatch.setattr(machine, "kernels", lambda device: 1 / 0)
    found = problems(DoctorConfig())
    assert [one.name for one in found] == ["kernels", "law"]
    assert all("ZeroDivisionError" in one.text for one in found)


def test_the_report_and_its_status(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert doctor(["test=false"]) == 0
    assert capsys.readouterr().out.rstrip().endswith("; problems: 0")
    lacks("rich")(monkeypatch, tmp_path)
    assert doctor(["test=false", "extras=serve,gpu", "json=true"]) == 1
    shown = json.loads(capsys.readouterr().out)
    bad = [one for one in shown["findings"] if one["status"] == PROBLEM]
    assert shown["counts"]["problem"] == len(bad) and {"idlm"} <= {one["name"] for one in bad}
    for given, words in (
        ("extras=[srve]", "did you mean 'serve'"),
        ("jsn=true", "did you mean 'json'"),
        ("extras=[x", "cannot read"),
    ):
        refused(words, doctor, [given])


@pytest.mark.sweep
def test_a_broken_installation_is_examined_to_the_end(tmp_path: Path) -> None:
    """A process of its own, with a runtime of antlr that hydra cannot use and a torch that does not load."""
    for name in ("antlr4", "torch"):
        (tmp_path / f"{name}.py").write_text("raise Exception('Could not deserialize ATN')")
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", "PYTHONSAFEPATH": "1"}
    command = [sys.executable, "-m", "idlm.cli.main", "doctor", "json=true"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    found = {one["name"]: one for one in json.loads(done.stdout)["findings"] if one["status"] == PROBLEM}
    assert {"torch", "hydra", "machine"} <= set(found)
