"""`idlm doctor`: whether this installation can run idlm, what it lacks, and whether its answers are right.

Nothing here imports torch or hydra before the doctor has looked at them."""

from __future__ import annotations

import json
import platform
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from idlm import __version__
from idlm.cli import command
from idlm.cli.help import CommandHelp
from idlm.config.schema import build, lookup, option
from idlm.errors import UserError
from idlm.infer.doctor import installation
from idlm.infer.doctor.installation import NOTE, OK, PROBLEM, Finding

if TYPE_CHECKING:
    import torch

SAFE = {"attention": "torch", "graphs": "off"}
"""Engine settings without Triton's attention and CUDA graphs."""
REPORT = "do not use this installation; send the output of `idlm doctor json=true` to the developers"


@dataclass(frozen=True, kw_only=True)
class DoctorConfig:
    device: str = option("what to test: auto, cpu, cuda or cuda:N", "auto")
    extras: list[str] = option("extras that must be complete; others may be absent", [])
    port: int = option("port of idlm-serve that should be free", 8000)
    test: bool = option("compare answers of a tiny random model with its law, for half a minute", True)
    json: bool = option("print one JSON object", False)


HELP = CommandHelp.of("idlm-doctor", DoctorConfig)


def main() -> int:
    return command.run(doctor)


def doctor(arguments: list[str]) -> int:
    if command.has_help_flag(arguments):
        return HELP.print(arguments)
    config, found = read_config(arguments), []
    for one in _findings(config):
        found.append(one)
        if not config.json:
            print(f"{one.status:<8} {one.name:<22} {command.printable(one.text)}", flush=True)
            print(f"{'':31} fix: {one.fix}\n" * bool(one.fix), end="", flush=True)
    counts = {status: sum(one.status == status for one in found) for status in (OK, NOTE, PROBLEM)}
    if config.json:
        about = {"idlm": __version__, "python": sys.version, "system": platform.platform(), "counts": counts}
        print(json.dumps({**about, "findings": [one._asdict() for one in found]}, indent=2))
    else:
        print(f"\nidlm {__version__}, Python {platform.python_version()}; problems: {counts[PROBLEM]}")
    return int(counts[PROBLEM] > 0)


def read_config(arguments: Iterable[str]) -> DoctorConfig:
    """The configuration, without hydra, which may be what is broken. UserError IDLM-0101."""
    import yaml

    problems: list[str] = []
    given: dict[str, Any] = {}
    for argument in arguments:
        key, _, text = argument.partition("=")
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError:
            problems.append(f"{key}: cannot read the value {text!r}")
            continue
        is_one = lookup(DoctorConfig, key) == list[str] and isinstance(value, str)
        given[key] = value.split(",") if is_one else value
    config: DoctorConfig = build(DoctorConfig, given, problems)
    if problems:
        raise UserError("IDLM-0101", "; ".join(problems), fix="correct these keys; --help lists every key")
    return config


def _findings(config: DoctorConfig) -> Iterator[Finding]:
    yield from installation.findings(config.extras)
    yield from _guarded("machine", lambda: _machine(config))


def _guarded(name: str, check: Callable[[], Iterable[Finding]]) -> Iterator[Finding]:
    """The findings of a check; what a broken kernel, compiler or library raises is one too."""
    try:
        yield from check()
    except UserError as error:
        yield Finding(PROBLEM, name, error.message, error.fix)
    except Exception as error:
        text = f"the check fails: {type(error).__name__}: {error}"
        yield Finding(PROBLEM, name, text, f"correct the problems above; if there is none, {REPORT}")


def _machine(config: DoctorConfig) -> Iterator[Finding]:
    from idlm.infer.build import resolve_device
    from idlm.infer.doctor import machine

    yield machine.gpu()
    device = resolve_device(config.device)
    num_gpus = machine.torch.cuda.device_count() if device.type == "cuda" else 0
    checks: dict[str, Callable[[], Iterable[Finding]]] = {
        "compiler": machine.compilers if num_gpus else tuple,
        "kernels": lambda: machine.kernels(device),
        "folders": machine.folders,
        "shared memory": lambda: [machine.shared_memory(num_gpus)],
        "port": lambda: [machine.port(config.port)],
        "law": lambda: self_test(device) if config.test else (),
    }
    for name, check in checks.items():
        yield from _guarded(name, check)


def self_test(device: torch.device) -> Iterator[Finding]:
    """Whether greedy and sampled answers on a device have the law of the model."""
    start = time.perf_counter()
    command.leave_out_unused()
    from idlm.infer.doctor import law

    found = list(law.problems(device))
    is_safe = bool(found) and device.type == "cuda" and not list(law.problems(device, **SAFE))
    options = " ".join(f"{key}={value}" for key, value in SAFE.items())
    fix = f"give {options}, with which the law holds here" if is_safe else REPORT
    yield from (Finding(PROBLEM, "law", problem, fix) for problem in found)
    if not found:
        text = "greedy tokens of isd are those of ar, and samples of both have the model's law"
        yield Finding(OK, "law", f"{text} ({device}, {time.perf_counter() - start:.0f} s)")


if __name__ == "__main__":
    sys.exit(main())
