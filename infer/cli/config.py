"""What the commands that build an engine share: their arguments, its loading, a streamed answer and figures;
and the arguments of `idlm-generate`. Decoders and accelerators own their options, so no schema names them."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from idlm.cli.command import importing
from idlm.cli.progress import Progress
from idlm.config.compose import compose, parse_value
from idlm.config.schema import fields_of, option
from idlm.contracts import Completion, SamplingParams
from idlm.errors import UserError
from idlm.infer.settings import EngineSettings, as_options

if TYPE_CHECKING:
    from idlm.infer.engine import Engine

KEY_VARIABLE = "IDLM_API_KEY"
NEEDED_FILES = (
    *(("overwrite", "output"), ("carry_keys", "output")),
    *(("carry_keys", "input"), ("drop_last_turn", "input")),
)
"""Options, and the file that each of them needs."""


@dataclass(frozen=True, kw_only=True)
class GenerateConfig(EngineSettings):
    describe: bool | Literal["memory"] = option(
        "print how the checkpoint is read, without loading or answering; memory: the planned workspace of a "
        "full-diffusion pass of max_length rows",
        False,
    )
    model: str | None = option("checkpoint directory", None, is_path=True)
    prompt: list[str] = option("prompts; also -p TEXT", [])
    input: str | None = option(
        'JSON lines (may be compressed), {"prompt": "..."} each, or prompt_ids, or messages; optional: '
        "sampling, and a unique id (default: the line number)",
        None,
        is_path=True,
    )
    drop_last_turn: bool = option(
        "if messages in input= end in an assistant turn, answer that turn again; false refuses them", False
    )
    carry_keys: bool = option(
        "copy unknown keys of input= to the records of output=; false refuses them", False
    )
    output: str | None = option("JSON lines, one completion each; null prints text", None, is_path=True)
    overwrite: bool = option("replace an existing output file", False)
    resume: bool = option(
        "continue an interrupted run from <output>.partial, or a finished output, and answer failed prompts "
        "again; model, decoder and sampling must be the same",
        False,
    )
    system: str | None = option("system prompt of text prompts, and of messages without one", None)
    stats: bool = option("show progress, tokens per forward, acceptance and speed on stderr", True)
    sampling: SamplingParams = field(default_factory=SamplingParams)


AnyConfig = TypeVar("AnyConfig", bound=EngineSettings)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineArguments:
    """Arguments of `Engine.from_pretrained`; `decoder` None is the one that the checkpoint is made for."""

    model: str
    decoder: str | None
    settings: dict[str, Any]
    options: dict[str, Any]

    def load(self, *, is_shown: bool = True) -> Engine:
        with loading(is_shown=is_shown):
            from idlm.infer.engine import Engine

            return Engine.from_pretrained(self.model, self.decoder, **self.settings, **self.options)


def read_arguments(
    name: str, schema: type[AnyConfig], arguments: Sequence[str]
) -> tuple[AnyConfig, EngineArguments]:
    """Parse the arguments of a command. UserError for mistakes that need no model to be found."""
    decoder, options, rest = split_plugin_options(arguments, plugin="decoder")
    accelerator_options, rest = take_accelerator_options(rest)
    config = compose(name, schema, rest)
    check_paths(config)
    settings = config.options()
    if accelerator_options:
        settings = with_options(settings, accelerator_options)
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
    """Split `plugin=NAME` and `plugin.OPTION=VALUE` off: the name or None, the options, the other
    arguments."""
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
    from idlm.infer.sparse.accelerator import ACCELERATORS

    chosen: dict[str, dict[str, Any]] = settings["accelerators"]
    idle = [name for name in options if name not in chosen]
    if idle:
        sides = {ACCELERATORS.get(name).side for name in idle}
        lost = [name for name in chosen if ACCELERATORS.get(name).side in sides]
        kept = [name for name in chosen if name not in lost]
        instead = f" in place of {', '.join(lost)} (one of each side is allowed)" if lost else ""
        raise UserError(
            "IDLM-0461",
            f"options of {', '.join(idle)} are given, and accelerators=[{','.join(chosen)}]",
            fix=f"write accelerators=[{','.join([*kept, *idle])}]{instead}, or leave the options out",
        )
    return settings | {"accelerators": {name: options.get(name, {}) for name in chosen}}


def check_paths(config: EngineSettings) -> None:
    """Raise UserError IDLM-0438 without model= (or url=, for clients), IDLM-0464 for an empty path (an unset
    shell variable), and IDLM-0439 for an option of a file that is not given."""
    paths = {
        name: getattr(config, name)
        for name, (known, _) in fields_of(type(config)).items()
        if known.metadata.get("is_path")
    }
    for name, value in (paths | {f"adapters.{name}": path for name, path in config.adapters.items()}).items():
        if isinstance(value, str) and not value.strip():
            raise UserError(
                "IDLM-0464", f"{name}={value!r} is empty", fix=f"give a path, or leave {name}= out"
            )
    for name, file in NEEDED_FILES:
        if getattr(config, name, False) and getattr(config, file) is None:
            raise UserError("IDLM-0439", f"{name}=true needs {file}=, which is not given", fix="leave it out")
    if not (getattr(config, "model", None) or getattr(config, "url", None)):
        other = ", or url=http://HOST:PORT, a server" if hasattr(config, "url") else ""
        raise UserError("IDLM-0438", "no model given", fix=f"give model=PATH, a checkpoint directory{other}")


def check_printed(params: SamplingParams, *, location: str = "") -> None:
    """Raise UserError IDLM-0489 for what text that is printed does not show."""
    scored = [name for name in ("logprobs", "prompt_logprobs") if getattr(params, name) is not None]
    if scored:
        raise UserError(
            "IDLM-0489",
            f"{location}sampling.{scored[0]}={getattr(params, scored[0])}, and text that is printed has none",
            fix=f"give output=FILE, whose records have {scored[0]}, or leave it out",
        )


def check_text(location: str, text: str) -> None:
    """Raise UserError IDLM-0436 for an empty prompt, and for unpaired surrogates."""
    if not text:
        raise UserError("IDLM-0436", f"{location}: prompt is empty", fix="give at least one token")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            "IDLM-0436", f"{location}: not valid text at {text[error.start : error.end]!r}", fix="give UTF-8"
        ) from error


def require_tokenizer(tokenizer: Any, what: str) -> None:
    """Raise UserError IDLM-0414 if a checkpoint has no tokenizer (None), which `what` needs."""
    if tokenizer is None:
        raise UserError(
            "IDLM-0414",
            f"{what} needs a tokenizer, and the checkpoint has none",
            fix='give token ids: input=FILE with lines like {"prompt_ids": [1, 2, 3]}',
        )


@contextmanager
def loading(**options: Any) -> Iterator[None]:
    """Show how much of the weights of models loaded inside is copied. `options` are those of `Progress`."""
    with Progress("loading", counts=False, **options) as shown:
        # Importing torch takes seconds, so the bar is shown first.
        with importing():
            import transformers  # noqa: F401

            from idlm.infer.models.weights import WATCHER

        def watch(num_done: int, total: int) -> None:
            shown.begin(total)
            shown.update(num_done)

        token = WATCHER.set(watch)
        try:
            yield
        finally:
            WATCHER.reset(token)


def engine_name(engine: Engine) -> str:
    """Decoder and accelerators, joined by +."""
    return "+".join((engine.decoder.name, *engine.settings.accelerator_options))


def print_stream(engine: Engine, prompt: str | list[int], params: SamplingParams, *, has_stats: bool) -> None:
    start, tally = time.perf_counter(), Tally()
    for event in engine.stream(prompt, params):
        print(event.text, end="", flush=True)
        completion = event.completion
    print()
    assert completion is not None
    if has_stats:
        tally.add(completion)
        tally.report(engine, time.perf_counter() - start)


@dataclass(slots=True)
class Tally:
    num_answers: int = 0
    num_tokens: int = 0
    num_forwards: int = 0
    num_tested: int = 0
    num_accepted: int = 0
    num_failed: int = 0
    num_cut_off: int = 0
    exactness: str = "exact"

    def add(self, done: Completion) -> None:
        self.num_answers += 1
        self.num_tokens += len(done.token_ids)
        self.num_forwards += done.num_forwards
        self.num_tested += sum(done.tested_by_position)
        self.num_accepted += sum(done.accepted_by_position)
        self.num_failed += done.error is not None
        self.num_cut_off += done.finish_reason == "length"
        if done.exactness != "exact":
            self.exactness = done.exactness

    def report(self, engine: Engine, seconds: float) -> None:
        if not self.num_forwards:
            return
        acceptance = f", acceptance {self.num_accepted / self.num_tested:.3f}" if self.num_tested else ""
        cut_off = f", {self.num_cut_off} of {self.num_answers} cut off" if self.num_cut_off else ""
        print(
            f"[{engine_name(engine)}, {self.exactness}] {self.num_tokens} tokens, "
            f"{self.num_tokens / self.num_forwards:.2f} per forward{acceptance}, "
            f"{self.num_tokens / seconds:.0f} tokens/s{cut_off}",
            file=sys.stderr,
        )
