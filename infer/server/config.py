"""Arguments of `idlm-serve`."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from idlm.config.schema import option
from idlm.contracts import SamplingParams
from idlm.errors import UserError
from idlm.infer.settings import EngineSettings, below_min

MAX_PORT = 65_535
HOST = re.compile(r"\*|[A-Za-z0-9]([A-Za-z0-9_.-]*[A-Za-z0-9])?")
ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^/\s*]+")


@dataclass(frozen=True, kw_only=True)
class ServeConfig(EngineSettings):
    """`idlm-serve`. Raises UserError IDLM-0705 that names every number out of range."""

    warmup: Literal["auto", "full", "off"] = option(
        "CUDA graphs captured before the first request: auto, as many as 20 s allow; full, all; off, none",
        "auto",
    )
    schedule: Literal["latency", "throughput"] = option(
        "latency: a prompt makes a step at most 2.5 times as long for answers under way; throughput: steps "
        "store most prompt tokens a second",
        "latency",
    )
    model: str | None = option("checkpoint directory", None, is_path=True)
    served_model_name: str | None = option("the model's name for clients; null is the directory's", None)
    host: str = option("address to listen on; one that other machines reach needs an API key", "127.0.0.1")
    port: int = option("port to listen on; 0 takes a free one", 8000)
    api_key: str | None = option(
        "key that clients send, or several with commas between; other users of this machine can read command "
        "lines, so prefer the environment variable IDLM_API_KEY",
        None,
    )
    allowed_origins: list[str] | None = option(
        "origins (https://HOST) whose pages a browser lets use the server; '*' is all; null is pages of this "
        "machine (localhost)",
        None,
    )
    allowed_hosts: list[str] | None = option(
        "names by which clients may call the server, besides addresses and localhost; '*' is all; null is "
        "none, or all if there is an API key",
        None,
    )
    page: bool = option("serve the page at /: chat, race and load in a browser; its files need no key", True)
    split_special_tokens: bool = option(
        "special tokens that the text of a chat spells are text; false: they are special, as in the template",
        True,
    )
    enable_thinking: bool | None = option(
        "passed to the chat template unless a request sets it; null leaves it to the template", None
    )
    reasoning_parser: Literal["auto", "none", "think"] = option(
        "what makes reasoning_content of a chat's answer: its <think> tags; auto if the template has them",
        "auto",
    )
    tool_parser: Literal[
        "auto", "none", "hermes", "deepseek", "mistral_args", "mistral", "granite", "llama"
    ] = option("how answers call tools (docs/serve.md); auto is as the chat template writes it", "auto")
    max_waiting: int | None = option(
        "answers that may wait for a lane before requests get status 429; null is 16 for each lane", None
    )
    max_n: int = option("largest n of a request", 16)
    max_prompts: int = option("prompts of a request to /v1/completions", 64)
    max_body: int = option("bytes of a request's body", 4 << 20)
    max_stored: int = option("bytes of responses that are stored in memory; 0 stores none", 64 << 20)
    max_header: int = option("bytes of a request's line and headers", 16 << 10)
    log_requests: bool = option("print a line for each request: client, route, status, seconds", False)
    drain_seconds: float = option("time for requests under way to finish after SIGTERM or Ctrl-C", 30.0)
    engine_timeout: float = option(
        "seconds without an answer after which an engine that has work is started again; loading does not "
        "count, compiling a kernel does",
        600.0,
    )
    sampling: SamplingParams = field(default_factory=SamplingParams)

    @property
    def model_name(self) -> str:
        """The name of `model` for clients."""
        return self.served_model_name or Path(self.model or "").resolve().name

    def __post_init__(self) -> None:
        EngineSettings.__post_init__(self)
        problems = below_min(
            self,
            *(("port", 0), ("max_waiting", 0), ("max_n", 1), ("max_prompts", 1), ("max_body", 1)),
            *(("max_header", 1024), ("max_stored", 0), ("drain_seconds", 0), ("engine_timeout", 1)),
        )
        if self.model_name in self.adapters:
            problems.append(f"adapters: {self.model_name!r} is the name of model= (served_model_name)")
        if self.sampling.adapter not in (None, *self.adapters):
            problems.append(f"sampling.adapter={self.sampling.adapter!r} is none of {[*self.adapters]}")
        if self.port > MAX_PORT:
            problems.append(f"port={self.port} must be <= {MAX_PORT}")
        wrong = [origin for origin in self.allowed_origins or () if not ORIGIN.fullmatch(origin)]
        if wrong:
            problems.append(f"allowed_origins: {wrong[0]!r} is no origin, as https://HOST:PORT is, or '*'")
        unknown = [host for host in self.allowed_hosts or () if not HOST.fullmatch(host)]
        if unknown:
            problems.append(f"allowed_hosts: {unknown[0]!r} is no name of a host without port, or '*'")
        if problems:
            raise UserError("IDLM-0705", "; ".join(problems), fix="correct the settings named")
