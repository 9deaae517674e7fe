"""Typed configuration of `idlm-generate` and `idlm-eval`; decoders and accelerators own their options."""

from __future__ import annotations

from dataclasses import dataclass, field

from idlm.contracts import SamplingParams, option
from idlm.errors import UserError
from idlm.infer.settings import EngineSettings


def refuse_empty(config: EngineSettings) -> None:
    """Raise UserError IDLM-0464 for an empty path, such as that of an unset shell variable, and IDLM-0439 for
    options of an output file that is not given.
    """
    for name in ("model", "base", "input", "output"):
        value = getattr(config, name, None)
        if value is not None and not value.strip():
            raise UserError(
                "IDLM-0464", f"{name}={value!r} is empty", fix=f"give a path, or leave {name}= out"
            )
    for name in ("overwrite", "carry_keys"):
        if getattr(config, name, False) and getattr(config, "output", None) is None:
            raise UserError("IDLM-0439", f"{name}=true needs output=, which is not given", fix="leave it out")


@dataclass(frozen=True, kw_only=True)
class GenerateConfig(EngineSettings):
    """`idlm-generate`."""

    describe: bool = option("print how the checkpoint is read, without loading or answering", False)

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
    system: str | None = option(
        "system prompt of the chat, of text prompts, and of messages without one", None
    )
    stats: bool = option("show progress, tokens per forward, acceptance and speed on stderr", True)
    sampling: SamplingParams = field(default_factory=SamplingParams)

    def input_options(self) -> dict[str, bool]:
        """How the lines of `input=` are read. Raises UserError IDLM-0439 for an option without that file."""
        options = {"drop_last_turn": self.drop_last_turn, "carry_keys": self.carry_keys}
        idle = [name for name, is_on in options.items() if is_on]
        if idle and not self.input:
            raise UserError(
                "IDLM-0439", f"{idle[0]}=true needs input=, which is not given", fix="leave it out"
            )
        return options


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig(EngineSettings):
    """`idlm-eval`: answers a task of idlm.tasks, with a baseline for comparison."""

    model: str | None = option("checkpoint directory", None)
    task: str = option("task name", "ledger")
    level: str = option("task level", "tiny")
    split: str = option("train, validation or test", "test")
    num: int = option("prompts", 200)
    baseline: str | None = option(
        "decoder to compare with; auto is one token per step (ar, or block with strategy=sequential for a "
        "block-causal checkpoint), null is none",
        "auto",
    )
    output: str | None = option("JSON lines with every completion and whether it is correct", None)
    overwrite: bool = option("replace an existing output file", False)
    sampling: SamplingParams = field(default_factory=SamplingParams)
