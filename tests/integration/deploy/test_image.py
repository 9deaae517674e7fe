"""The container image and the compose file. No Docker engine runs here: both are parsed, and what can run
without one runs."""

from __future__ import annotations

import http.server
import json
import re
import shlex
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from idlm.infer.cli.config import read_arguments
from idlm.infer.server.config import ServeConfig
from idlm.infer.server.guard import OPEN_PATHS
from idlm.infer.server.run import KEY_VARIABLE, check_address
from tests.errors import refused
from tests.repo.files import listed

ROOT = Path(__file__).resolve().parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def instructions() -> list[tuple[str, str]]:
    """(keyword, arguments) of the Dockerfile in order, without comments, continued lines joined."""
    text = re.sub(r"^\s*#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.M)
    lines = [line for line in text.replace("\\\n", " ").splitlines() if line.strip()]
    return [(keyword.upper(), rest.strip()) for keyword, _, rest in (line.partition(" ") for line in lines)]


def positions(keyword: str, pattern: str = "") -> list[int]:
    return [
        number for number, (word, rest) in enumerate(instructions()) if word == keyword and pattern in rest
    ]


def words_of(keyword: str) -> list[str]:
    """The words of the only instruction of this keyword, which has the form of JSON."""
    [number] = positions(keyword)
    words: list[str] = json.loads(re.sub(r"^[^[]*?(CMD )?(?=\[)", "", instructions()[number][1]))
    return words


def test_the_image_copies_files_and_installs_extras_that_exist() -> None:
    for number in positions("COPY"):
        *copied, _target = [word for word in instructions()[number][1].split() if not word.startswith("--")]
        assert copied
        assert all((ROOT / name).exists() for name in copied)
    [own] = positions("RUN", "pip install --no-cache-dir -e")
    extras = re.search(r"-e '\.\[([\w,-]+)\]'", instructions()[own][1])
    assert extras
    assert set(extras[1].split(",")) <= set(PROJECT["optional-dependencies"]) - {"dev"}


def test_only_tracked_files_are_copied() -> None:
    """And `.git`, which tells a run its commit: all that git ignores is ignored here too."""
    ignored = set((ROOT / ".dockerignore").read_text().split())
    rules = [line.rstrip("/") for line in (ROOT / ".gitignore").read_text().splitlines()]
    rules = [rule for rule in rules if rule and not rule.startswith("#")]
    assert len(rules) > 8
    assert not [
        rule for rule in rules if not ignored & {rule, f"**/{rule}", "**/.*_cache" * rule.endswith("_cache")}
    ]
    tops = {name.split("/")[0] for name in listed(untracked=False)}
    assert not tops & ignored


def test_the_default_command_serves_the_mounted_model_and_needs_a_key() -> None:
    program, *arguments = words_of("CMD")
    assert program == "idlm-serve"
    config, _ = read_arguments("serve", ServeConfig, arguments)
    assert config.model == "/model" and str(config.port) == instructions()[positions("EXPOSE")[0]][1]
    check_address(config.host, "key")
    refused(KEY_VARIABLE, check_address, config.host, None)


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers as the server does: 200 for routes that are open, 401 for others."""

    def do_GET(self) -> None:
        self.send_response(200 if self.path in OPEN_PATHS else 401)
        self.end_headers()

    def log_message(self, format: str, *arguments: Any) -> None:
        pass


@pytest.fixture
def port() -> Iterator[int]:
    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join(30)


def test_the_health_check_asks_the_servers_open_route(port: int) -> None:
    program, flag, code = words_of("HEALTHCHECK")
    [found] = re.findall(r"127\.0\.0\.1:(\d+)(/\w+)", code)
    assert (program, flag) == ("python3", "-c") and found == (str(ServeConfig().port), "/health")

    def status(text: str) -> int:
        return subprocess.run([sys.executable, flag, text], capture_output=True, timeout=60).returncode

    here = code.replace(found[0], str(port))
    assert status(here) == 0
    assert status(here.replace("/health", "/metrics")) != 0, "a refusal is not healthy"
    assert status(code.replace(found[0], "1")) != 0, "no server is not healthy"


def test_the_compose_file_runs_the_image_as_it_is_meant() -> None:
    [(_, service)] = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"].items()
    program, *arguments = shlex.split(re.sub(r"\$\{\w+:-(\w+)\}", r"\1", service["command"]))
    config, _ = read_arguments("serve", ServeConfig, arguments)
    assert program == "idlm-serve" and config.served_model_name
    assert service["environment"][KEY_VARIABLE].startswith(f"${{{KEY_VARIABLE}:?"), "no key, no start"
    assert service["ports"] == [f"127.0.0.1:{config.port}:{config.port}"]
    model, cache = service["volumes"]
    assert model.startswith("${MODEL:?") and model.endswith(f":{config.model}:ro")
    [user] = [rest for word, rest in instructions() if word == "USER"]
    assert cache.partition(":")[2] == f"/home/{user}"
    assert int(service["stop_grace_period"].removesuffix("s")) > config.drain_seconds
    [device] = service["deploy"]["resources"]["reservations"]["devices"]
    assert device["capabilities"] == ["gpu"]


def test_the_systemd_unit_of_the_docs_drains() -> None:
    [unit] = re.findall(r"^```ini\n(.*?)^```", (ROOT / "docs" / "deploy.md").read_text(), re.M | re.S)
    shown = dict(line.split("=", 1) for line in unit.splitlines() if "=" in line and line[0] != "#")
    program, *arguments = shlex.split(shown["ExecStart"])
    config, _ = read_arguments("serve", ServeConfig, arguments)
    assert program.endswith("/idlm-serve")
    assert shown["KillMode"] == "mixed" and int(shown["TimeoutStopSec"]) > config.drain_seconds
