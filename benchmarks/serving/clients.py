"""Benchmark clients of others against `idlm-serve` with the bundled model: which complete a run.

    python -m benchmarks.clients [clients=genai-bench,guidellm,aiperf,vllm] [folder=DIR] [device=cpu]
        [path=CHECKPOINT] [record=true]

Each client has an environment of its own in `folder`, named after it, which pip installs into when it is
missing. A run asks for 8 streamed answers, two at a time; it passes if the client ends well and the server
has counted as many requests that ended with their whole length. Rows: `requests` (case client, version).
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import urllib.request
import venv
from pathlib import Path

from benchmarks.options import parse_options
from benchmarks.results import RESULTS, append_rows, result_row
from idlm.cli import command
from idlm.errors import UserError
from idlm.infer.clients.arms import launched, serve_program

TINY = Path(__file__).resolve().parents[2] / "recipes" / "assets" / "tiny_ar"
NUM, PROMPT, ANSWER = 8, 32, 16
INSTALL_SECONDS, RUN_SECONDS, READY_SECONDS = 1500, 600, 120.0
TAIL_CHARS = 3000
FINISHED = re.compile(r"^vllm:request_success_total\{[^}]*finished_reason=\"length\"[^}]*\} ([\d.e+]+)", re.M)
DEFAULTS = {
    "clients": "genai-bench,guidellm,aiperf,vllm",
    "folder": "",
    "device": "cpu",
    "path": str(TINY),
    "record": "true",
    "results": str(RESULTS),
}


def words(client: str, url: str, path: str, home: Path) -> list[str]:
    """The client's command, without its folder."""
    return {
        "genai-bench": [
            *("genai-bench", "benchmark", "--api-backend", "openai", "--api-base", url),
            *(
                "--api-key",
                "unused",
                "--api-model-name",
                "tiny",
                "--model-tokenizer",
                path,
                "--task",
                "text-to-text",
            ),
            *("--traffic-scenario", f"D({PROMPT},{ANSWER})", "--num-concurrency", "2"),
            *("--max-time-per-run", "1", "--max-requests-per-run", str(NUM)),
            *("--experiment-base-dir", str(home)),
        ],
        "guidellm": [
            *("guidellm", "run", "--backend", f"kind=openai_http,target={url},model=tiny"),
            *("--profile", "kind=concurrent,streams=2", "--constraint", f"kind=max_requests,count={NUM}"),
            *("--tokenizer", f"kind=huggingface_auto,model={path}"),
            *("--data", f"kind=synthetic_text,prompt_tokens={PROMPT},output_tokens={ANSWER}"),
            *("--output", f"kind=json,path={home / 'guidellm.json'}"),
        ],
        "aiperf": [
            *("aiperf", "profile", "--model", "tiny", "--url", url, "--endpoint-type", "chat", "--streaming"),
            *("--tokenizer", path, "--concurrency", "2", "--request-count", str(NUM), "--ui", "simple"),
            *("--synthetic-input-tokens-mean", str(PROMPT), "--output-tokens-mean", str(ANSWER)),
            *("--extra-inputs", "ignore_eos:true", "--output-artifact-dir", str(home)),
        ],
        "vllm": [
            *("vllm", "bench", "serve", "--model", "tiny", "--tokenizer", path, "--base-url", url),
            *("--dataset-name", "random", "--random-input-len", str(PROMPT), "--ignore-eos"),
            *("--random-output-len", str(ANSWER), "--num-prompts", str(NUM), "--max-concurrency", "2"),
        ],
    }[client]


def main() -> int:
    """Console entry point."""
    return command.run(measure)


def measure(arguments: list[str]) -> int:
    """Run every client; the status is 1 if one did not complete its run."""
    options = parse_options(arguments, DEFAULTS)
    chosen, known = options["clients"].split(","), DEFAULTS["clients"].split(",")
    if unknown := sorted({*chosen} - {*known}):
        raise UserError("IDLM-0107", f"unknown client {', '.join(unknown)}", fix=f"use some of {known}")
    folder = Path(options["folder"] or tempfile.mkdtemp(prefix="idlm-clients-"))
    program = serve_program(
        [f"model={options['path']}", f"device={options['device']}", "served_model_name=tiny"]
    )
    num_failed = 0
    with launched(program, "/ready", seconds=READY_SECONDS) as url:
        for client in chosen:
            version = install(client, folder / client)
            before, status = num_finished(url), run(client, folder / client, url, options["path"])
            num = num_finished(url) - before
            is_complete = status == 0 and num >= NUM
            case = {"client": client, "version": version}
            row = result_row(
                *("serve", case, "requests", num, "requests"),
                gate_passed=is_complete,
                command="python -m benchmarks.clients",
            )
            print(f"{client} {version}: status {status}, {num} whole answers", flush=True)
            if options["record"] == "true":
                append_rows("serve", [row], results=Path(options["results"]))
            num_failed += not is_complete
    return int(num_failed > 0)


def install(client: str, folder: Path) -> str:
    """Make the client's environment if it is missing; returns the client's version."""
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
        pip = [str(python), "-m", "pip", "install", "--quiet", client]
        subprocess.run(pip, timeout=INSTALL_SECONDS, check=True)
    asks = f"import importlib.metadata as m; print(m.version({client!r}))"
    said = subprocess.run(
        [str(python), "-c", asks], capture_output=True, text=True, timeout=RUN_SECONDS, check=True
    )
    return said.stdout.strip()


def run(client: str, folder: Path, url: str, path: str) -> int | None:
    """Its exit status, None if it took too long; prints the end of its output if it fails."""
    # Offline, aiperf looks for the tokenizer's path among what the hub's cache holds.
    dropped = ("PYTHONPATH", "PYTHONSAFEPATH", "PYTHONHOME", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    environment = {
        **{name: value for name, value in os.environ.items() if name not in dropped},
        "DO_NOT_TRACK": "1",
        "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
    }
    with tempfile.TemporaryDirectory() as home:
        name, *arguments = words(client, url, path, Path(home))
        try:
            done = subprocess.run(
                [str(folder / "bin" / name), *arguments],
                cwd=home,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=RUN_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired as late:
            print((late.output or b"").decode(errors="replace")[-TAIL_CHARS:])
            return None
    if done.returncode:
        print(done.stdout.decode(errors="replace")[-TAIL_CHARS:])
    return done.returncode


def num_finished(url: str) -> int:
    """Requests that ended with their whole length, as the server counts them."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"{url}/metrics", timeout=10) as response:
        return int(sum(map(float, FINISHED.findall(response.read().decode()))))


if __name__ == "__main__":
    sys.exit(main())
