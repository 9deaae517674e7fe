"""Arguments of `idlm-chat` and `idlm-bench`: the settings of an engine, or the address of a server."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from idlm.config.schema import changed, option
from idlm.contracts import SamplingParams
from idlm.errors import UserError
from idlm.infer.cli.config import EngineArguments
from idlm.infer.settings import EngineSettings, below_min

MODEL = (
    "checkpoint directory, which is loaded here; with url=, the server's name of the model (null: its first)"
)
API_KEY = (
    "key for url=; other users of this machine can read command lines, so prefer the environment variable "
    "IDLM_API_KEY"
)


@dataclass(frozen=True, kw_only=True)
class ChatConfig(EngineSettings):
    """`idlm-chat`. Raises UserError IDLM-0440 for several answers per turn, IDLM-0215 without the chat
    template."""

    model: str | None = option(MODEL, None, is_path=True)
    url: str | None = option(
        "address of a server with OpenAI's interface, such as http://127.0.0.1:8000", None
    )
    api_key: str | None = option(API_KEY, None)
    system: str | None = option("system prompt", None)
    stats: bool = option("show tokens per forward, acceptance and speed", True)
    sampling: SamplingParams = field(default_factory=SamplingParams)

    def __post_init__(self) -> None:
        EngineSettings.__post_init__(self)
        if self.sampling.n > 1:
            raise UserError("IDLM-0440", "a chat has one answer per turn", fix="leave sampling.n out")
        if self.chat_template == "none":
            raise UserError(
                "IDLM-0215",
                "a chat needs the chat template, which chat_template=none leaves out",
                fix="leave it out, or complete text with idlm-generate -p",
            )


@dataclass(frozen=True, kw_only=True)
class BenchConfig(EngineSettings):
    """`idlm-bench`. Raises UserError IDLM-0706 that names every number out of range, and options that exclude
    each other."""

    model: str | None = option(MODEL, None, is_path=True)
    url: list[str] = option("addresses of servers with OpenAI's interface; ratios are over the first", [])
    api_key: str | None = option(API_KEY, None)
    api: Literal["engine", "http"] = option(
        "with a checkpoint: in this process, or through idlm-serve, which is started for it", "engine"
    )
    concurrency: list[int] = option("closed loop: requests at a time, one load each", [1, 4, 16, 64, 256])
    rate: list[float] = option("open loop in its place: arrivals per second (Poisson), one load each", [])
    load: Literal["mixed", "fixed"] = option(
        "mixed: 32 to 2,048 prompt tokens (log-normal) and 64 to 768 answer tokens; fixed: input_tokens and "
        "output_tokens",
        "mixed",
    )
    scale: int = option("divides the lengths of load=mixed, for a small model", 1)
    input_tokens: int = option("prompt tokens of load=fixed", 512)
    output_tokens: int = option("answer tokens of load=fixed", 128)
    num_requests: int | None = option(
        "requests of a load; null is 2 for each at a time, and at least 16", None
    )
    endpoint: Literal["completions", "chat"] = option(
        "completions: prompts are random token ids; chat: messages of as many short words", "completions"
    )
    prompts: str = option(
        "random: as in endpoint=; text: a built-in list of questions; a task such as ledger; or a file, of "
        "JSON lines as for idlm-generate or with a text a line. All but random are chats",
        "random",
        is_path=True,
    )
    vocab_size: int = option("random token ids are below this; every checkpoint has 150", 150)
    seed: int = option(
        "draws lengths, prompts and arrivals; a running server may have cached the prompts of a run", 1
    )
    ignore_eos: bool | None = option(
        "answers have their whole length; null: with random prompts; false leaves the field out of requests",
        None,
    )
    timeout: float = option("seconds until a request fails", 600.0)
    output: str | None = option("JSON lines, one for each arm and load", None, is_path=True)
    overwrite: bool = option("replace an existing output file", False)
    plot: str | None = option("figure of all loads (.png, .svg or .pdf)", None, is_path=True)
    sampling: SamplingParams = field(default_factory=SamplingParams)

    def __post_init__(self) -> None:
        EngineSettings.__post_init__(self)
        problems = below_min(
            self,
            *(("concurrency", 1), ("rate", 1e-6), ("scale", 1), ("input_tokens", 1), ("output_tokens", 1)),
            *(("num_requests", 1), ("vocab_size", 4), ("timeout", 1e-3)),
        )
        if not (self.concurrency or self.rate):
            problems.append("concurrency=[] has no load")
        if problems:
            raise UserError("IDLM-0706", "; ".join(problems), fix="correct the settings named")


def check_unused(config: ChatConfig | BenchConfig, arguments: EngineArguments) -> None:
    """Raise UserError IDLM-0710 for options of an engine where a server answers."""
    given = [*changed(config, EngineSettings())]
    given += ["decoder"] * (arguments.decoder is not None or bool(arguments.options))
    if config.url and given:
        raise UserError(
            "IDLM-0710",
            f"url= names a server, which has settings of its own, and these are given: {', '.join(given)}",
            fix="leave them out, or give model=PATH in place of url=",
        )
