"""The paper's way to its data: prompts, the base model's own answers, a conversion trained on them. And
that a generation which is stopped loses nothing."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from idlm.errors import UserError
from idlm.infer.cli.generate import generate
from idlm.infer.cli.output import answer_file, partial_path
from idlm.tasks import TASKS
from idlm.text.tokenizer import encode_messages, load_tokenizer
from idlm.train import cli
from idlm.train.config.schema import DataConfig
from idlm.train.data.base import SOURCES, Encoder
from tests.errors import refused
from tests.integration.inference.command_lines import AR, MODEL, TINY, read_lines, write_lines

PLAIN = [*MODEL, *AR, "sampling.seed=1", "stats=false"]


def prompts(num: int) -> list[str]:
    task = TASKS.get("ledger")(level="tiny")
    return [task.sample(index, "train").prompt for index in range(num)]


def read(path: Path, encoder: Encoder) -> Any:
    return SOURCES.get("jsonl")(DataConfig(path=str(path), cache_dir=str(path.parent / "cache")), encoder)


@pytest.mark.sweep
def test_prompts_answers_training(tmp_path: Path) -> None:
    texts = prompts(6)
    chat = [{"role": "user", "content": texts[0]}]
    lines: list[Any] = [{"prompt": text} for text in texts[1:]]
    lines.append({"messages": chat})
    lines.append({"prompt": texts[1], "sampling": {"max_tokens": 5}})
    source, output = write_lines(tmp_path / "prompts.jsonl", lines), tmp_path / "answers.jsonl"
    assert (
        generate([*PLAIN, f"input={source}", f"output={output}", "sampling.max_tokens=160", "max_num_seqs=8"])
        == 0
    )
    records, tokenizer = read_lines(output), load_tokenizer(TINY)
    encoder = Encoder(tokenizer, mask_token_id=170, use_chat_template=True)
    data = read(output, encoder)
    assert data.header["shapes"] == {"answers": len(lines)}
    for index, record in enumerate(records):
        sample = data.sample(index)
        messages = record["prompt"]
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        prompt_ids = encode_messages(tokenizer, messages)
        assert sample.token_ids.tolist() == prompt_ids + record["token_ids"], (
            "these are not the model's tokens"
        )
        assert sample.supervised.tolist() == [False] * len(prompt_ids) + [True] * len(record["token_ids"])
        is_closed = sample.token_ids[-1] == tokenizer.eos_token_id
        assert is_closed == (record["finish_reason"] == "stop")
    assert records[-1]["finish_reason"] == "length"
    run = tmp_path / "run"
    overrides = [
        *("recipe=tiny", "data.source=jsonl", f"data.path={output}", f"output_dir={run}"),
        "train.stages=[{stride: 2, steps: 2, clean_weight: 0.2}]",
        *("train.steps=null", "train.threads=1", "train.batch_size=1", "report.enabled=false"),
    ]
    assert cli.main(overrides) == 0
    metrics = [json.loads(line) for line in (run / "run" / "metrics.jsonl").read_text().splitlines()]
    assert all(np.isfinite(record["loss"]) for record in metrics if "loss" in record)


def test_answers_are_rendered_where_their_ids_are_not_ours(tmp_path: Path) -> None:
    """Another tokenizer's ids, text that a stop string ended, and answers cut off by a limit."""
    tokenizer = load_tokenizer(TINY)
    eos = tokenizer.eos_token_id
    answer = {"prompt": "Sam has 1", "text": "Sam has 2.", "num_prompt_tokens": 5}
    ids = tokenizer.encode(answer["text"], add_special_tokens=False)
    assert len(encode_messages(tokenizer, [{"role": "user", "content": "Sam has 1"}])) == 5 + 1
    answer["num_prompt_tokens"] = 6
    records = [
        answer | {"token_ids": [*ids, eos], "finish_reason": "stop"},
        answer | {"token_ids": [5, 6, 7], "finish_reason": "stop"},
        answer | {"token_ids": [5, 6, 7], "finish_reason": "length"},
    ]
    path = write_lines(tmp_path / "answers.jsonl", records)
    encoder = Encoder(tokenizer, mask_token_id=170, use_chat_template=True)
    source = read(path, encoder)
    output = [sample.token_ids[sample.supervised].tolist() for sample in map(source.sample, range(3))]
    assert output == [[*ids, eos], [*ids, eos], ids]
    write_lines(path, [answer | {"token_ids": ids, "finish_reason": "stop", "num_prompt_tokens": 9}])
    refused(r"IDLM-0227.*answers\.jsonl:1.*had 9", read, path, encoder)


def test_only_the_file_is_blamed_for_what_the_file_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = str(tmp_path / "out")
    with pytest.raises(OSError, match="not the output"), answer_file(output) as answers:
        answers.write({"a": 1})
        raise OSError(5, "not the output")
    assert partial_path(output).read_text() == '{"a": 1}\n'

    class Full(io.StringIO):
        def flush(self) -> None:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "open", lambda *args, **kwargs: Full())
    with pytest.raises(UserError, match=r"IDLM-0442.*No space left"), answer_file(output) as answers:
        answers.write({"a": 1})


def test_answers_to_other_prompts_are_not_continued(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", [{"prompt": text} for text in prompts(3)])
    partial = tmp_path / "out.partial"
    partial.write_text(json.dumps({"request_id": "1", "index": 0, "prompt": "Lea has 9."}) + "\n")
    kept = partial.read_text()
    with pytest.raises(UserError, match=r"IDLM-0444.*Lea has 9"):
        generate([*PLAIN, f"input={source}", f"output={tmp_path / 'out'}", "resume=true"])
    assert partial.read_text() == kept
    refused("IDLM-0445", generate, [*PLAIN, "-p", "Lea", "resume=true"])
