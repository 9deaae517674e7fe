"""Record a turn of `idlm-chat`, and the same turn by AR, as docs/plots/chat.svg.

    python -m docs.figures.chat MODEL TURN [BASE [stride=3 rejection_strategy=alternate]]

MODEL is a converted checkpoint, or an adapter of BASE; what follows are options of the decoder. Tokens that
one pass emitted together have one colour, as in the chat. Times are those of this machine."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from rich.console import Console

from idlm.contracts import SamplingParams
from idlm.infer.cli.config import EngineArguments
from idlm.infer.clients.chat import Chat, EngineAnswerer
from idlm.infer.clients.view import TerminalView

PATH = Path(__file__).parents[1] / "plots" / "chat.svg"
WIDTH, MAX_TOKENS = 88, 160


class RecordingView(TerminalView):
    """A terminal on which `turns` are typed."""

    def __init__(self, turns: Sequence[str]) -> None:
        self.console = Console(record=True, file=io.StringIO(), width=WIDTH, highlight=False)
        super().__init__(self.console, has_stats=True)
        self._turns = iter(turns)

    def read(self) -> str:
        for turn in self._turns:
            self.console.print(f"\n> {turn}", style="bold")
            return turn
        raise EOFError


def record(model: str, turn: str, base: str | None, options: dict[str, Any]) -> str:
    """The SVG of a chat of one turn and its comparison with AR."""
    # Most CPUs multiply several rows in 16 bits one after the other.
    dtype = "auto" if torch.cuda.is_available() else "float32"
    settings = {"max_num_seqs": 1, "max_length": 1024, "dtype": dtype, "base": base}
    arguments = EngineArguments(model=model, decoder=None, settings=settings, options=options)
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
    answerer = EngineAnswerer(arguments.load(), arguments)
    # The first answer of an engine takes longer.
    list(answerer.answer([{"role": "user", "content": turn}], SamplingParams(max_tokens=4), ()))
    view = RecordingView([turn, "/compare"])
    Chat(answerer, view, params).run()
    text = view.console.export_svg(title="idlm-chat", unique_id="idlm")
    # The viewer's own fonts, so that nothing is fetched.
    return re.sub(r"@font-face \{.*?\}\s*", "", text, flags=re.DOTALL)


if __name__ == "__main__":
    model, turn, *rest = sys.argv[1:]
    base = rest[0] if rest else None
    options = {key: yaml.safe_load(value) for key, value in (word.split("=", 1) for word in rest[1:])}
    PATH.write_text(record(model, turn, base, options), encoding="utf-8")
