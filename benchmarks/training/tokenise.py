"""A run that tokenises for minutes before its first step, under the watchdog.

    python -m benchmarks.tokenise [seconds=600] [workers=1] [tokenizer=FOLDER] [hang_seconds=600]
        [record=true] [results=FOLDER]

`idlm-train` of one step on a CPU, on conversations cut from the project's own text, as many as take about
`seconds` at the rate of a first short run. The watchdog ends a run, and this command, with status 75 when
nothing reports progress for `SLOW_FACTOR * hang_seconds`; `longest_silence` is how long nothing did.
"""

from __future__ import annotations

import json
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.options import parse_options
from benchmarks.results import RESULTS, append_rows, result_row
from benchmarks.training.packed_text import own_text
from idlm.cli import command
from idlm.errors import UserError
from idlm.train.config.schema import LoopConfig
from idlm.train.loop.liveness import progress_count
from idlm.train.loop.watchdog import SLOW_FACTOR

OPTIONS = {"seconds": "600", "workers": "1", "hang_seconds": str(LoopConfig().hang_seconds)}
OPTIONS |= {"tokenizer": "recipes/assets/tiny_ar", "record": "false", "results": str(RESULTS)}
FIRST_RECORDS = 4000
PROMPT, RESPONSE = 400, 3200
"""Characters of the parts of a conversation."""
MODEL = {
    "model_type": "qwen3",
    "vocab_size": 151_936,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}


@dataclass(slots=True)
class Silence(threading.Thread):
    """Watches the count of progress while it runs; all figures in seconds."""

    began: float = 0.0
    last: float = 0.0
    longest: float = 0.0
    ending: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        threading.Thread.__init__(self, daemon=True)

    __hash__ = threading.Thread.__hash__

    def run(self) -> None:
        count, self.began = progress_count(), 0.0
        self.last = time.monotonic()
        while not self.ending.wait(0.05):
            now, seen = time.monotonic(), progress_count()
            self.longest = max(self.longest, now - self.last)
            if seen != count:
                count, self.last = seen, now
                self.began = self.began or now


def main() -> int:
    """Console entry point."""
    return command.run(measure)


def measure(arguments: list[str]) -> int:
    """Run, print and optionally record rows."""
    options = parse_options(arguments, OPTIONS)
    with tempfile.TemporaryDirectory(prefix="idlm-tokenise-") as temporary:
        first = run(Path(temporary) / "first", FIRST_RECORDS, options)
        num_records = round(FIRST_RECORDS / first["seconds"] * float(options["seconds"]))
        found = run(Path(temporary) / "long", num_records, options)
    limit = SLOW_FACTOR * float(options["hang_seconds"])
    print(
        f"{found['tokens']:,} tokens in {found['seconds']:.0f} s with {options['workers']} worker(s); nothing"
        f" reported progress for {found['silence']:.1f} s at most, the watchdog ends a run after {limit:.0f}"
    )
    case = {
        "workers": int(options["workers"]),
        "limit_s": limit,
        "tokenizer": Path(options["tokenizer"]).name,
    }
    case |= {"tokens": found["tokens"]}
    rows = [
        result_row("tokenise", case, "seconds", found["seconds"], "s", gate_passed=True),
        result_row("tokenise", case, "tokens_per_s", found["tokens"] / found["seconds"], "tokens/s"),
        result_row("tokenise", case, "longest_silence", found["silence"], "s", gate_passed=True),
    ]
    if options["record"] == "true":
        append_rows("tokenise", rows, results=Path(options["results"]))
    return 0


def run(folder: Path, num_records: int, options: dict[str, str]) -> dict[str, Any]:
    """Tokens, seconds and silence of a run on so many records. Raises UserError IDLM-0108 if it fails."""
    from idlm.train import cli

    folder.mkdir()
    write_records(folder / "data.jsonl", num_records)
    values: dict[str, Any] = {
        "output_dir": folder / "out",
        "model.path": "null",
        "model.tokenizer": options["tokenizer"],
        **{f"+model.config.{key}": value for key, value in MODEL.items()},
        "data.source": "jsonl",
        "data.path": folder / "data.jsonl",
        "data.cache_dir": folder / "cache",
        "data.workers": options["workers"],
        "train.stages": "[{stride: 2, steps: 1}]",
        "train.batch_size": 1,
        "train.accumulation": 1,
        "train.max_length": 128,
        "train.overlong": "split",
        "train.device": "cpu",
        "train.threads": 1,
        "train.hang_seconds": options["hang_seconds"],
        "report.enabled": "false",
    }
    silence = Silence()
    silence.start()
    status = cli.main([f"{key}={value}" for key, value in values.items()])
    silence.ending.set()
    silence.join(timeout=10)
    if status:
        raise UserError("IDLM-0108", f"the run ended with status {status}", fix="see its output above")
    headers = [json.loads(path.read_text()) for path in folder.glob("cache/*/*/data.json")]
    return {
        "tokens": max(header["num_tokens"] for header in headers),
        "seconds": silence.last - silence.began,
        "silence": silence.longest,
    }


def write_records(path: Path, num_records: int) -> None:
    """Conversations from any place of the text, so that those of a second pass are others."""
    text, step = own_text(), 1009
    with path.open("w", encoding="utf-8") as file:
        for number in range(num_records):
            start = number * step * 7 % (len(text) - PROMPT - RESPONSE)
            middle = start + PROMPT
            # The text names special tokens too: with a number before it no prompt begins with one.
            record = {
                "prompt": f"{number} {text[start:middle]}",
                "response": text[middle : middle + RESPONSE],
            }
            file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    sys.exit(main())
