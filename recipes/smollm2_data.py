"""Prompts and answers of a conversion in which the model itself writes its training data.

    python recipes/smollm2_data.py headers 32000 > headers.jsonl
    idlm-generate model=outputs/smollm2_base decoder=ar chat_template=none input=headers.jsonl \\
        output=written.jsonl sampling.temperature=1 sampling.top_p=0.95 sampling.max_tokens=256
    python recipes/smollm2_data.py turns written.jsonl > turns.jsonl
    python recipes/smollm2_data.py prompts turns.jsonl gsm8k_train.jsonl sampled=1 > prompts.jsonl
    idlm-generate model=outputs/smollm2_base decoder=ar input=prompts.jsonl output=answers.jsonl \\
        sampling.temperature=1 sampling.top_p=0.95 sampling.max_tokens=512
    python recipes/smollm2_data.py kept answers.jsonl > outputs/smollm2_kept.jsonl

`headers` are chats that stop where the user's turn begins, so the model continues as the user. `turns` are
those that ended, once each; recipes/assets/smollm2_turns.jsonl.xz holds 29,115 of them, in place of the first
three commands. `prompts` are turns and the questions of GSM8K; each gets a greedy answer, which drafts at
temperature 0 have to match, and `sampled` answers with a seed of their own, in an order that mixes all.
`kept` leaves out answers that failed and those that loop: some run of `LOOP_LENGTH` tokens occurs more than
`LOOP_COUNT` times. Answers that the limit cut off stay, and training does not learn to stop there. Counts go
to stderr. Seeds make the same prompts and answers again, as far as the rounding of other batches lets them.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from idlm.cli import command
from idlm.errors import UserError
from idlm.files.paths import json_lines, json_problem, translate_path_errors, unpacked

HEADER = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "<|im_start|>user\n"
)
"""What the chat template of SmolLM2 writes before the first turn of a user."""
MIN_TOKENS = 5
LOOP_LENGTH, LOOP_COUNT = 8, 3
TURN = ("request_id", "text")
ANSWER = (*TURN, "token_ids", "finish_reason")
"""Keys of an answer of `idlm-generate`."""


def main(argv: list[str] | None = None) -> int:
    return command.run(write, argv)


def write(arguments: list[str]) -> int:
    """Write the rows that the first argument names to stdout.

    Raises:
        UserError: no number of answers, or a file without the rows that are needed."""
    rows: Iterable[dict[str, Any]]
    match arguments:
        case ["headers", count] if count.isdecimal():
            rows = headers(int(count))
        case ["turns", written]:
            rows = turns(_records(written, ANSWER))
        case ["prompts", written, questions, *options] if len(options) < 2:
            num = options[0].removeprefix("sampled=") if options else "1"
            if not num.isdecimal():
                raise UserError(
                    "IDLM-0624", f"{options[0]}: not a number of answers", fix="for example sampled=2"
                )
            rows = prompts(_records(written, TURN), _records(questions, ("question",)), int(num))
        case ["kept", answers]:
            rows = kept(_records(answers, ANSWER))
        case _:
            print(__doc__, file=sys.stderr)
            return 0 if command.has_help_flag(arguments) else command.USER_ERROR_STATUS
    for row in rows:
        print(json.dumps(row, ensure_ascii=False))
    return 0


def headers(count: int) -> Iterator[dict[str, Any]]:
    for number in range(count):
        yield {"id": f"user{number}", "prompt": HEADER, "sampling": {"seed": number}}


def turns(written: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The turns that ended, once each."""
    found: dict[str, str] = {}
    for record in written:
        if record["finish_reason"] == "stop" and len(record["token_ids"]) >= MIN_TOKENS:
            found.setdefault(record["text"].strip(), record["request_id"])
    found.pop("", None)
    print(f"{len(found):,} turns", file=sys.stderr)
    return [{"request_id": name, "text": text} for text, name in found.items()]


def prompts(
    turns: Iterable[dict[str, Any]], questions: Iterable[dict[str, Any]], num_sampled: int
) -> list[dict[str, Any]]:
    """Rows for `idlm-generate`: every turn and question once; answer 0 is greedy."""
    found = {record["text"]: record["request_id"] for record in turns}
    num_turns = len(found)
    for number, record in enumerate(questions):
        found.setdefault(record["question"], f"gsm8k{number}")
    print(f"{num_turns:,} turns and {len(found) - num_turns:,} questions", file=sys.stderr)
    rows: list[dict[str, Any]] = []
    for text, name in found.items():
        rows.append({"id": f"{name}-0", "prompt": text, "sampling": {"temperature": 0}})
        for answer in range(1, num_sampled + 1):
            key = f"{name}-{answer}"
            rows.append({"id": key, "prompt": text, "sampling": {"seed": _hash(key) >> 1}})
    return sorted(rows, key=lambda row: _hash(row["id"]))


def kept(answers: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The answers that did not fail and do not loop."""
    counts, num_tokens = Counter[str](), 0
    for record in answers:
        reason = record["finish_reason"]
        is_loop = loops(record["token_ids"])
        counts["loop" if is_loop else reason] += 1
        if not is_loop and reason in ("stop", "length"):
            num_tokens += len(record["token_ids"])
            yield record
    print(f"{num_tokens:,} tokens kept; answers by end: {dict(counts.most_common())}", file=sys.stderr)


def loops(token_ids: Sequence[int]) -> bool:
    """Whether some run of LOOP_LENGTH tokens occurs more than LOOP_COUNT times."""
    runs = zip(*(token_ids[first:] for first in range(LOOP_LENGTH)), strict=False)
    return max(Counter(runs).values(), default=0) > LOOP_COUNT


def _records(path: str, keys: Collection[str]) -> Iterator[dict[str, Any]]:
    fix = f"give JSON lines, objects with {', '.join(keys)}"
    with translate_path_errors("IDLM-0625", path, fix=fix), Path(path).open("rb") as file:
        for number, value in json_lines(unpacked(file, Path(path))):
            if not (isinstance(value, dict) and value.keys() >= set(keys)):
                problem = json_problem(value) if isinstance(value, Exception) else "keys are missing"
                raise UserError("IDLM-0625", f"{path}:{number} cannot be used: {problem}", fix=fix)
            yield value


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


if __name__ == "__main__":
    sys.exit(main())
