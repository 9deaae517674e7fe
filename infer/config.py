"""Typed configuration of `idlm-generate` and `idlm-eval`. Decoder options are not here: each decoder owns its
own.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

from idlm.contracts import SamplingParams
from idlm.errors import UserError


def _help(text: str, default: Any) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(kw_only=True)
class SamplingConfig:
    """Sampling settings of every prompt that brings none of its own."""

    temperature: float = _help("0 is greedy, 1 the model's own law", 1.0)
    top_p: float = _help("keep the shortest likeliest prefix of this mass; 1 is off", 1.0)
    top_k: int = _help("keep the k likeliest tokens; 0 is off", 0)
    min_p: float = _help("drop tokens below this share of the likeliest; 0 is off", 0.0)
    seed: int | None = _help("random stream of each prompt; null draws a fresh one", None)
    max_tokens: int = _help("longest answer", 512)
    stop: list[str] = field(default_factory=list, metadata={"help": "strings that end the answer"})
    stop_token_ids: list[int] = field(default_factory=list, metadata={"help": "ids that end the answer"})
    ignore_eos: bool = _help("go on past the end-of-sequence token", False)
    logprobs: int | None = _help("also return log-probabilities, with this many alternatives", None)
    n: int = _help("answers per prompt", 1)
    tau: float = _help("relaxed acceptance of drafts (decoder=isd, lossy); 0 is exact", 0.0)
    decoder_options: dict[str, Any] = field(
        default_factory=dict,
        metadata={"help": "options of the decoder that a request may set (block: threshold, ...)"},
    )

    def params(self, **changes: Any) -> SamplingParams:
        """The engine's form, with single settings replaced."""
        values: dict[str, Any] = dataclasses.asdict(self) | changes
        for key, value in values.items():
            values[key] = tuple(value) if isinstance(value, list) else value
        return SamplingParams(**values)


@dataclass(kw_only=True)
class EngineConfig:
    """Where and how the model runs: the fields of `EngineSettings`, one by one."""

    device: str = _help("auto, cpu, cuda or cuda:N", "auto")
    dtype: str = _help("auto (the checkpoint's), float32, bfloat16, float16", "auto")
    mask_token_id: int | None = _help("overrides the checkpoint's mask token", None)
    base: str | None = _help(
        "base model of a gated adapter; null is the path in its adapter_config.json", None
    )
    accelerator: list[str] | str | None = field(
        default_factory=list,
        metadata={"help": "plug-ins that thin attention; options: accelerator.NAME.OPTION=VALUE"},
    )
    memory: str = _help("memory manager", "caching")
    max_num_seqs: int = _help("sequences that run at once", 64)
    max_length: int | None = _help("prompt and answer together; null is the model's context", None)
    max_num_batched_tokens: int = _help("prompt tokens stored in one pass", 1024)
    page_size: int | None = _help("slots of a KV page; null is 16, or more to hold whole blocks", None)
    num_pages: int | None = _help("KV pages; null lets the memory manager decide", None)
    prefix_cache: bool = _help("share the KV of equal beginnings, and keep it for later", True)
    num_inflight_steps: int | None = _help(
        "passes launched before the results of earlier ones are read; null is 4 on a GPU, else 0", None
    )
    graphs: Literal["auto", "on", "off"] = _help(
        "on: passes of static shape, in CUDA graphs on a GPU; auto is on where there is a GPU", "auto"
    )
    attention: str = _help("back end of paged attention", "auto")
    deterministic: bool = _help(
        "bits that do not depend on the batch, nor on the rows of a pass (GPU)", False
    )
    tensor_parallel: int = _help("GPUs that share the model; the command starts a process for each", 1)
    weights: Literal["auto", "fp8"] = _help(
        "fp8: projections of half the bytes (e4m3), lossy; auto is dtype", "auto"
    )
    kv_cache: Literal["auto", "fp8"] = _help(
        "fp8: keys and values of half the bytes (e4m3), so twice the pages, lossy; auto is dtype", "auto"
    )
    template: Literal["auto", "none"] = _help(
        "auto uses the tokenizer's chat template for text prompts, none does not", "auto"
    )

    def options(self) -> dict[str, Any]:
        """Keywords for `Engine.from_pretrained`. Imports the accelerators."""
        from idlm.infer.sparse.stack import as_options

        values = {key: getattr(self, key) for key in EngineConfig.__dataclass_fields__}
        return {"accelerators": as_options(values.pop("accelerator")), **values}


def refuse_empty(config: EngineConfig) -> None:
    """UserError IDLM-0464 for a path that is given and empty, as by a shell variable that nobody set."""
    for name in ("model", "base", "input", "output"):
        value = getattr(config, name, None)
        if value is not None and not value.strip():
            raise UserError(
                "IDLM-0464", f"{name}={value!r} is empty", fix=f"give a path, or leave {name}= out"
            )


@dataclass(kw_only=True)
class GenerateConfig(EngineConfig):
    """`idlm-generate`."""

    describe: bool = _help("print what is understood of the checkpoint, load nothing, answer nothing", False)

    model: str | None = _help("checkpoint directory", None)
    prompt: list[str] = field(default_factory=list, metadata={"help": "prompts; also -p TEXT"})
    input: str | None = _help(
        'JSON lines (or .gz), {"prompt": "..."} each, or prompt_ids, or messages; beside it sampling, and id '
        "(without one it is the line's number; no two lines may have one id)",
        None,
    )
    drop_last_turn: bool = _help(
        "of messages in input= that end in an assistant turn, answer that turn anew; false refuses them",
        False,
    )
    carry_keys: bool = _help(
        "carry unknown keys of input= through to the records of output=; false refuses them", False
    )
    output: str | None = _help("JSON lines, one completion each; null prints text", None)
    overwrite: bool = _help("replace an existing output file", False)
    resume: bool = _help(
        "go on with the answers that an interrupted run left in <output>.partial, or with a finished output, "
        "and answer again what failed; model, decoder and sampling must be those of the answers there",
        False,
    )
    system: str | None = _help(
        "system prompt of the chat, of every text prompt, and of messages that begin without one", None
    )
    stats: bool = _help("show progress, tokens per forward, acceptance and speed on stderr", True)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)

    def input_options(self) -> dict[str, bool]:
        """How the lines of `input=` are read; UserError IDLM-0439 for an option without that file."""
        options = {"drop_last_turn": self.drop_last_turn, "carry_keys": self.carry_keys}
        idle = [name for name, is_on in options.items() if is_on]
        if idle and not self.input:
            raise UserError(
                "IDLM-0439", f"{idle[0]}=true is about input=, which is not given", fix="leave it out"
            )
        return options


@dataclass(kw_only=True)
class EvaluateConfig(EngineConfig):
    """`idlm-eval`: a task of idlm.tasks, decoded side by side with a baseline."""

    model: str | None = _help("checkpoint directory", None)
    task: str = _help("task name", "ledger")
    level: str = _help("task level", "tiny")
    split: str = _help("train, validation or test", "test")
    num: int = _help("prompts", 200)
    baseline: str | None = _help(
        "decoder to run beside; auto is one token per pass (ar, or block with strategy=sequential for a "
        "block-causal checkpoint), null is none",
        "auto",
    )
    output: str | None = _help("JSON lines with every completion and its verdict", None)
    overwrite: bool = _help("replace an existing output file", False)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
