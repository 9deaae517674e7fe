"""`idlm-chat`: a conversation on a terminal or through pipes, with an engine of this process or a server.

Modules that import torch or httpx are imported inside functions, so that help and configuration errors come
at once."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Collection, Generator, Iterator
from contextlib import closing
from typing import TYPE_CHECKING

from idlm.cli import command
from idlm.config import schema as schemas
from idlm.config.compose import parse_value
from idlm.contracts import SamplingParams
from idlm.errors import UserError
from idlm.infer.cli.config import EngineArguments, check_text, engine_name, read_arguments, require_tokenizer
from idlm.infer.cli.help import EngineHelp
from idlm.infer.cli.prompts import check_system
from idlm.infer.clients.config import ChatConfig, check_unused
from idlm.infer.clients.view import Chunk, View, make_view, unechoed
from idlm.text.tokenizer import encode_messages

if TYPE_CHECKING:
    from idlm.infer.clients.http import ServerAnswerer
    from idlm.infer.engine import Engine

COMMANDS = {
    "/reset": "start over; the system prompt stays",
    "/system TEXT": "set the system prompt; without a text there is none",
    "/set NAME=VALUE": "change a sampling setting (temperature=0); alone it shows all",
    "/compare": "give the last turn to decoder=ar too, one token per pass, and compare the speed",
    "/help": "show these lines; a turn with a slash first needs a space before it",
    "/exit": "end, as Ctrl-D does; Ctrl-C ends an answer, of which the text so far stays",
}
FIXED = ("n", "logprobs")

HELP = EngineHelp.of("idlm-chat", ChatConfig)


def main() -> int:
    return command.run(chat)


def chat(arguments: list[str]) -> int:
    """Run the command; returns the exit status, which is 1 if a turn that came through a pipe failed."""
    if command.has_help_flag(arguments):
        return HELP.print(arguments)
    config, engine_arguments = read_arguments("chat", ChatConfig, arguments)
    check_unused(config, engine_arguments)
    answerer = _answerer(config, engine_arguments)
    answerer.check_system(config.system)
    return Chat(answerer, make_view(has_stats=config.stats), config.sampling, config.system).run()


def _answerer(config: ChatConfig, arguments: EngineArguments) -> EngineAnswerer | ServerAnswerer:
    if config.url is None:
        # One turn is answered at a time; that leaves memory for a second engine (/compare).
        settings = arguments.settings | {"max_num_seqs": config.max_num_seqs or 1}
        arguments = dataclasses.replace(arguments, settings=settings)
        return EngineAnswerer(arguments.load(is_shown=config.stats), arguments)
    from idlm.infer.clients.http import Server, ServerAnswerer

    return ServerAnswerer(Server(config.url, api_key=config.api_key, model=config.model))


class EngineAnswerer:
    """An engine of this process. Raises UserError IDLM-0215 without a chat template."""

    def __init__(self, engine: Engine, arguments: EngineArguments | None = None) -> None:
        require_tokenizer(engine.tokenizer, "a chat")
        if not engine.tokenizer.chat_template:
            raise UserError(
                "IDLM-0215",
                "a chat needs a chat template, and the checkpoint's tokenizer has none",
                fix="add chat_template to tokenizer_config.json, or complete text with idlm-generate -p",
            )
        self._engine, self.name = engine, f"{engine_name(engine)}, {engine.exactness}"
        self._arguments = arguments

    def by_ar(self, messages: list[dict[str, str]]) -> EngineAnswerer | None:
        """The same checkpoint decoded by AR; None if it is already."""
        if self._arguments is None or self._engine.decoder.name == "ar":
            return None
        arguments = dataclasses.replace(self._arguments, decoder="ar", options={})
        made = EngineAnswerer(arguments.load(), arguments)
        # The first answer of an engine takes longer, and does not count.
        list(made.answer(messages, SamplingParams(max_tokens=4), ()))
        return made

    def check_system(self, system: str | None) -> None:
        """Raise UserError IDLM-0458 for a system prompt that the chat template cannot honour."""
        check_system(self._engine.tokenizer, system)

    def answer(
        self, messages: list[dict[str, str]], params: SamplingParams, always: Collection[str]
    ) -> Generator[Chunk]:
        """Stream the next turn. `always`: settings that hold even if they are the defaults. Closing it
        aborts; Ctrl-C raises KeyboardInterrupt when the request has ended."""
        engine = self._engine
        prompt = encode_messages(engine.tokenizer, messages, max_tokens=engine.settings.max_length)
        with closing(engine.stream(prompt, params)) as events:
            for event in events:
                accepted, tested = engine.draft_counts(event.request_id)
                done, num_forwards = event.completion, None
                if done is not None:
                    accepted, tested = sum(done.accepted_by_position), sum(done.tested_by_position)
                    num_forwards = done.num_forwards
                yield Chunk(event.text, len(event.token_ids), num_forwards, accepted, tested)
                if event.error is not None:
                    raise event.error


class Chat:
    def __init__(
        self,
        answerer: EngineAnswerer | ServerAnswerer,
        view: View,
        params: SamplingParams,
        system: str | None = None,
    ) -> None:
        self._answerer, self._view, self._params, self._system = answerer, view, params, system
        self._messages: list[dict[str, str]] = []
        self._was_set: set[str] = set()
        self._ar: EngineAnswerer | None = None
        self._speed = 0.0

    def run(self) -> int:
        """Read lines until the input ends or one is /exit; returns the exit status."""
        self._view.note(f"{self._answerer.name}; /help lists commands, Ctrl-D ends", is_greeting=True)
        num_failed = 0
        while True:
            try:
                line = self._view.read()
                if line.startswith("/"):
                    if line.split()[0] == "/exit":
                        return int(num_failed > 0)
                    self._command(*line.rstrip().partition(" ")[::2])
                elif line.strip():
                    self._turn(line.strip())
            except EOFError:
                return int(num_failed > 0)
            except UserError as error:
                self._view.note(f"error {error}")
                num_failed += not self._view.is_terminal
            except KeyboardInterrupt as interrupt:
                # SIGTERM ends the command everywhere, Ctrl-C where there is no terminal.
                if isinstance(interrupt, command.Terminated) or not self._view.is_terminal:
                    raise
                self._view.note("")

    def _turn(self, text: str) -> None:
        """Answer one turn. A part of an answer stays when it is stopped; a turn without any is forgotten."""
        check_text("this turn", text)
        sent, answer = [*self._messages, {"role": "user", "content": text}], ""
        try:
            for text_so_far in self._shown(self._answerer, sent):
                answer = text_so_far
        finally:
            if answer:
                self._speed = self._view.figures.speed
                self._messages = [*sent, {"role": "assistant", "content": answer}]

    def _shown(self, answerer: EngineAnswerer | ServerAnswerer, sent: list[dict[str, str]]) -> Iterator[str]:
        """Show the answer to the messages; yields all of it so far after each piece."""
        system = [] if self._system is None else [{"role": "system", "content": self._system}]
        pieces = answerer.answer([*system, *sent], self._params, self._was_set)
        with unechoed(), closing(pieces):
            yield from self._view.show(pieces)

    def _compare(self) -> None:
        """Answer the last turn by AR as well; the conversation stays as it is."""
        sent = self._messages[:-1]
        if sent and self._ar is None and isinstance(self._answerer, EngineAnswerer):
            self._ar = self._answerer.by_ar(sent)
        if not sent or self._ar is None:
            what = "/compare needs an answer by a decoder of this process other than ar"
            raise UserError("IDLM-0714", what, fix="start with model= and decoder=isd, and give a turn first")
        list(self._shown(self._ar, sent))
        ratio = self._speed / self._view.figures.speed
        self._view.note(f"{self._answerer.name}: {ratio:.2f} times the speed of ar")

    def _command(self, name: str, text: str) -> None:
        """A line that begins with a slash. Raises UserError for what it cannot do."""
        match name:
            case "/reset":
                self._messages.clear()
                self._view.note("the conversation starts over")
            case "/system":
                system = text.strip() or None
                self._answerer.check_system(system)
                self._system = system
                self._view.note("the system prompt is set" if system else "there is no system prompt")
            case "/set":
                self._set(text.strip())
            case "/compare":
                self._compare()
            case "/help":
                self._view.note("\n".join(f"{usage:<16} {what}" for usage, what in COMMANDS.items()))
            case _:
                raise UserError(
                    "IDLM-0714",
                    f"{name} is not a command of the chat",
                    fix="use /help, which lists the commands, or put a space before a turn",
                )

    def _set(self, text: str) -> None:
        names = [each.name for each in dataclasses.fields(SamplingParams) if each.name not in FIXED]
        if text:
            name, equals, value = text.partition("=")
            name = name.strip().removeprefix("sampling.")
            if name not in names or not equals:
                what = f"{name} cannot be set here" if name in FIXED else f"cannot read {text!r}"
                if equals and name not in FIXED:
                    what = schemas.unknown_key(SamplingParams, name)
                raise UserError(
                    "IDLM-0714", what, fix=f"write /set NAME=VALUE with one of {', '.join(names)}"
                )
            self._params = dataclasses.replace(self._params, **{name: parse_value(name, value.strip())})
            self._was_set.add(name)
        self._view.note("  ".join(f"{name}={getattr(self._params, name)}" for name in names))


if __name__ == "__main__":
    sys.exit(main())
