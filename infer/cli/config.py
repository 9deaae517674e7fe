"""Arguments of the commands that build an engine: their typed configuration, and the engine that they ask
for. Those of `idlm-chat` and `idlm-bench` are in `idlm.infer.clients`.

Decoders and accelerators own their options, so no schema here names them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from idlm.config.compose import compose, parse_value
from idlm.config.schema import option
from idlm.contracts import LARGEST_NUMBER, SamplingParams
from idlm.errors import UserError
from idlm.infer.cli.progress import loading
from idlm.infer.settings import EngineSettings, as_options

if TYPE_CHECKING:
    from idlm.infer.engine import Engine

KEY_VARIABLE = "IDLM_API_KEY"
"""Environment variable with the key of a server."""
NEEDED_FILES = (
    *(("overwrite", "output"), ("carry_keys", "output")),
    *(("carry_keys", "input"), ("drop_last_turn", "input")),
)
"""Options, and the file that each of them needs."""


@dataclass(frozen=True, kw_only=True)
class GenerateConfig(EngineSettings):
    """`idlm-generate`."""

    describe: bool | Literal["memory"] = option(
        "print how the checkpoint is read, without loading or answering; memory: the planned workspace of a "
        "full-diffusion pass of max_length rows",
        False,
    )

    model: str | None = option("checkpoint directory", None)
    prompt: list[str] = option("prompts; also -p TEXT", [])
    input: str | None = option(
        'JSON lines (or .gz), {"prompt": "..."} each, or prompt_ids, or messages; optional: sampling, and a '
        "unique id (default: the line number)",
        None,
    )
    drop_last_turn: bool = option(
        "if messages in input= end in an assistant turn, answer that turn again; false refuses them", False
    )
    carry_keys: bool = option(
        "copy unknown keys of input= to the records of output=; false refuses them", False
    )
    output: str | None = option("JSON lines, one completion each; null prints text", None)
    overwrite: bool = option("replace an existing output file", False)
    resume: bool = option(
        "continue an interrupted run from <output>.partial, or a finished output, and answer failed prompts "
        "again; model, decoder and sampling must be the same",
        False,
    )
    system: str | None = option("system prompt of text prompts, and of messages without one", None)
    stats: bool = option("show progress, tokens per forward, acceptance and speed on stderr", True)
    sampling: SamplingParams = field(default_factory=SamplingParams)


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig(EngineSettings):
    """`idlm-eval`: answers a task of idlm.tasks or of a file, with a baseline for comparison."""

    model: str | None = option("checkpoint directory", None)
    task: str = option(
        "a generated task (ledger, trace, recall), or one whose problems are in data= (gsm8k, math500, "
        "humaneval, mbpp)",
        "ledger",
    )
    data: str | None = option("the task's problems, as published: JSON lines (or .gz) or a JSON list", None)
    harness: Literal["idlm", "lm_eval"] = option(
        "lm_eval runs a task of lm-eval on the file data=, with its own prompts and metrics (extra: eval)",
        "idlm",
    )
    fewshot_data: str | None = option(
        "harness=lm_eval: the file of the examples in a prompt; null is none, unless the task writes them",
        None,
    )
    allow_code: bool = option("run programs that the model writes, in a sandbox (humaneval, mbpp)", False)
    level: str = option("level of a generated task", "tiny")
    split: str = option("train, validation or test, of a generated task", "test")
    num: int | None = option("prompts; null: 200 of a generated task, all of a file", None)
    baseline: str | None = option(
        "decoder to compare with; auto is one token per step (ar, or block with strategy=sequential for a "
        "block-causal checkpoint), null is none",
        "auto",
    )
    compare: list[str] = option("more decoders, each with options: NAME:OPTION:VALUE", [])
    output: str | None = option("JSON lines with every completion and whether it is correct", None)
    overwrite: bool = option("replace an existing output file", False)
    sampling: SamplingParams = field(default_factory=SamplingParams)


@dataclass(frozen=True, kw_only=True)
class ServeConfig(EngineSettings):
    """`idlm-serve`. Raises UserError IDLM-0705 that names every number out of range."""

    warmup: Literal["auto", "full", "off"] = option(
        "CUDA graphs captured before the first request: auto, as many as 20 s allow; full, all; off, none",
        "auto",
    )
    model: str | None = option("checkpoint directory", None)
    served_model_name: str | None = option("the model's name for clients; null is the directory's", None)
    host: str = option("address to listen on; one that other machines reach needs an API key", "127.0.0.1")
    port: int = option("port to listen on; 0 takes a free one", 8000)
    api_key: str | None = option(
        "key that clients send; other users of this machine can read command lines, so prefer the "
        "environment variable IDLM_API_KEY",
        None,
    )
    enable_thinking: bool | None = option(
        "passed to the chat template unless a request sets it; null leaves it to the template", None
    )
    reasoning_parser: Literal["auto", "none", "think"] = option(
        "what makes reasoning_content of a chat's answer: its <think> tags; auto if the template knows them",
        "auto",
    )
    tool_parser: Literal["auto", "none", "hermes"] = option(
        "how answers call tools: hermes is JSON in <tool_call> tags; auto if the template says so", "auto"
    )
    max_waiting: int | None = option(
        "answers that may wait for a lane before requests get status 429; null is 16 for each lane", None
    )
    max_n: int = option("largest n of a request", 16)
    max_prompts: int = option("prompts of a request to /v1/completions", 64)
    max_body: int = option("bytes of a request's body", 4 << 20)
    max_header: int = option("bytes of a request's line and headers", 16 << 10)
    drain_seconds: float = option("time for requests under way to finish after SIGTERM or Ctrl-C", 30.0)
    engine_timeout: float = option(
        "seconds without an answer after which an engine that has work is started again; loading does not "
        "count, compiling a kernel does",
        600.0,
    )
    sampling: SamplingParams = field(default_factory=SamplingParams)

    def __post_init__(self) -> None:
        EngineSettings.__post_init__(self)
        bounds = {
            "port": (0, 65535),
            "max_waiting": (0, None),
            "max_n": (1, None),
            "max_prompts": (1, None),
            "max_body": (1, None),
            "max_header": (1024, None),
            "drain_seconds": (0, None),
            "engine_timeout": (1, None),
        }
        problems = [
            f"{name}={value} must be {f'in [{least}, {most}]' if most else f'>= {least}'}"
            for name, (least, most) in bounds.items()
            if (value := getattr(self, name)) is not None
            and not least <= value <= (LARGEST_NUMBER if most is None else most)
        ]
        if problems:
            raise UserError("IDLM-0705", "; ".join(problems), fix="correct the settings named")


AnyConfig = TypeVar("AnyConfig", bound=EngineSettings)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineArguments:
    """Arguments of `Engine.from_pretrained`: a checkpoint, the decoder (None: the one that it is made for),
    engine settings, and options of the decoder.
    """

    model: str
    decoder: str | None
    settings: dict[str, Any]
    options: dict[str, Any]

    def load(self, *, is_shown: bool = True) -> Engine:
        """The engine; with `is_shown`, a progress bar shows the weights that are read."""
        with loading(is_shown=is_shown):
            from idlm.infer.engine import Engine

            return Engine.from_pretrained(self.model, self.decoder, **self.settings, **self.options)


def read_arguments(
    name: str, schema: type[AnyConfig], arguments: Sequence[str]
) -> tuple[AnyConfig, EngineArguments]:
    """Return what the arguments of a command say. UserError for mistakes that need no model to be found."""
    decoder, options, rest = split_plugin_options(arguments, plugin="decoder")
    accelerator_options, rest = take_accelerator_options(rest)
    config = compose(name, schema, rest)
    check_paths(config)
    settings = with_options(config.options(), accelerator_options)
    misplaced = sorted(settings.keys() & options.keys())
    if misplaced:
        raise UserError(
            "IDLM-0441", f"decoder.{misplaced[0]} is not a decoder option", fix=f"write {misplaced[0]}=VALUE"
        )
    return config, EngineArguments(
        model=str(getattr(config, "model", None)), decoder=decoder, settings=settings, options=options
    )


def split_plugin_options(
    arguments: Sequence[str], *, plugin: str
) -> tuple[str | None, dict[str, Any], list[str]]:
    """Take `plugin=name` and `plugin.option=value` out of command-line arguments.

    Returns the name or None, the options with values in the grammar of all overrides, and the remaining
    arguments.
    """
    name, options, rest = None, {}, []
    for argument in arguments:
        key, equals, value = argument.lstrip("+").partition("=")
        if equals and key == plugin:
            name = value
        elif equals and key.startswith(f"{plugin}."):
            options[key.removeprefix(f"{plugin}.")] = parse_value(key, value)
        else:
            rest.append(argument)
    return name, options, rest


def take_accelerator_options(arguments: Sequence[str]) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Split `accelerators.NAME.OPTION=VALUE` off: options by name, and the other arguments."""
    names, flat, rest = split_plugin_options(arguments, plugin="accelerators")
    options: dict[str, dict[str, Any]] = {}
    for key, value in flat.items():
        name, dot, option = key.partition(".")
        if not dot:
            raise UserError(
                "IDLM-0461",
                f"accelerators.{key} does not name an accelerator and an option",
                fix="write accelerators.NAME.OPTION=VALUE, for example accelerators.mage.k=512",
            )
        options.setdefault(name, {})[option] = value
    if names is not None and names != "null" and not names.startswith("["):
        as_options(names)
    return options, rest if names is None else [*rest, f"accelerators={names}"]


def with_options(settings: dict[str, Any], options: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Engine keywords with the options of accelerators; UserError IDLM-0461 for options of one not chosen."""
    if not options:
        return settings
    from idlm.infer.accelerators.base import ACCELERATORS

    chosen: dict[str, dict[str, Any]] = settings["accelerators"]
    sides = {name: ACCELERATORS.get(name).side for name in (*chosen, *options)}
    idle = [name for name in options if name not in chosen]
    if idle:
        kept = [name for name in chosen if sides[name] not in {sides[other] for other in idle}]
        lost = [name for name in chosen if name not in kept]
        written = f"accelerators=[{','.join([*kept, *idle])}]"
        raise UserError(
            "IDLM-0461",
            f"options of {', '.join(idle)} are given, and accelerators=[{','.join(chosen)}]",
            fix=(
                f"write {written} in place of {', '.join(lost)} (one of each side is allowed)"
                if lost
                else f"write {written}"
            )
            + ", or leave the options out",
        )
    return settings | {"accelerators": {name: options.get(name, {}) for name in chosen}}


def check_paths(config: EngineSettings) -> None:
    """Raise UserError IDLM-0438 without model= (or url=, for clients), IDLM-0464 for an empty path, such as
    that of an unset shell variable, and IDLM-0439 for an option of a file that is not given.
    """
    for name in ("model", "base", "input", "output", "data", "fewshot_data"):
        value = getattr(config, name, None)
        if value is not None and not value.strip():
            raise UserError(
                "IDLM-0464", f"{name}={value!r} is empty", fix=f"give a path, or leave {name}= out"
            )
    for name, file in NEEDED_FILES:
        if getattr(config, name, False) and getattr(config, file) is None:
            raise UserError("IDLM-0439", f"{name}=true needs {file}=, which is not given", fix="leave it out")
    is_client = hasattr(config, "url")
    if not (getattr(config, "model", None) or getattr(config, "url", None)):
        other = ", or url=http://HOST:PORT, a server" if is_client else ""
        raise UserError("IDLM-0438", "no model given", fix=f"give model=PATH, a checkpoint directory{other}")


def check_text(place: str, text: str) -> None:
    """Raise UserError IDLM-0436 for an empty prompt, and for unpaired surrogates, which neither a tokenizer
    nor a file accepts.
    """
    if not text:
        raise UserError("IDLM-0436", f"{place}: prompt is empty", fix="give at least one token")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            "IDLM-0436", f"{place}: not valid text at {text[error.start : error.end]!r}", fix="give UTF-8"
        ) from error


def require_tokenizer(tokenizer: Any, what: str) -> None:
    """Raise UserError IDLM-0414 if a checkpoint has no tokenizer (None), which `what` needs."""
    if tokenizer is None:
        raise UserError(
            "IDLM-0414",
            f"{what} needs a tokenizer, and the checkpoint has none",
            fix='give token ids: input=FILE with lines like {"prompt_ids": [1, 2, 3]}',
        )
