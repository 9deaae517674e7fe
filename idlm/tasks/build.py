"""Write generated samples as JSON lines: `python -m idlm.tasks.build num=1000 output=x.jsonl`.

Keys: task (ledger), level (tiny), split (train), start (0), num, seed (0), output.
Each line has `prompt` and `response`.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from idlm.config.suggest import did_you_mean
from idlm.errors import UserError
from idlm.tasks import TASKS

_DEFAULTS = {
    "task": "ledger",
    "level": "tiny",
    "split": "train",
    "start": "0",
    "num": "",
    "seed": "0",
    "output": "",
}


def parse_arguments(arguments: Sequence[str]) -> dict[str, str]:
    """Return all keys with their values; IDLM-0225 for an unknown, malformed or missing one."""
    values = dict(_DEFAULTS)
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if not equals or key not in values:
            raise UserError(
                "IDLM-0225",
                f"cannot use the argument {argument!r}{did_you_mean(key, values)}",
                fix=f"write key=value with a key among: {', '.join(values)}",
            )
        values[key] = value
    missing = [key for key, value in values.items() if not value]
    if missing:
        raise UserError(
            "IDLM-0225", f"no value for {', '.join(missing)}", fix=f"add {missing[0]}=... to the command"
        )
    return values


def _whole_number(values: dict[str, str], key: str) -> int:
    if not values[key].isascii() or not values[key].isdigit():
        raise UserError(
            "IDLM-0225", f"{key} is {values[key]!r}, it must be a whole number", fix=f"write {key}=1000"
        )
    return int(values[key])


def build(arguments: Sequence[str]) -> Path:
    """Generate what the arguments say, return the file; an older one is replaced only when complete."""
    values = parse_arguments(arguments)
    start, num, seed = (_whole_number(values, key) for key in ("start", "num", "seed"))
    task = TASKS.get(values["task"])(level=values["level"], seed=seed)
    output = Path(values["output"])
    staging = output.with_name(f".{output.name}.{os.getpid()}.partial")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with staging.open("w", encoding="utf-8") as file:
            for index in range(start, start + num):
                sample = task.sample(index, values["split"])
                file.write(json.dumps({"prompt": sample.prompt, "response": sample.response}) + "\n")
        staging.replace(output)
    except OSError as error:
        reason = f"cannot write {output}: {error.strerror}"
        raise UserError("IDLM-0226", reason, fix="free space or choose another output=") from error
    finally:
        staging.unlink(missing_ok=True)
    return output


def main() -> int:
    """Run from the command line; a user's mistake prints its message and exits with 2."""
    try:
        print(build(sys.argv[1:]))
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
