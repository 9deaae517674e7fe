"""Eight steps of the tiny recipe equal a plain PyTorch loop that shares no code with `train/`.

The reference runs every sample by itself as the paper writes it, `[x_t | x_0]` of 2L rows under a dense mask
made from the definition, with the logits of all rows in memory. One optimizer step is one pass over the file,
so neither loop has to know in which rows the trainer packs the samples. The learning rate is a thirtieth of
the recipe's: at 3e-3 two orders of summation alone part by 1e-4 within eight steps.

The second case is a sweep."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from torch.nn import functional

from idlm.tasks import TASKS
from idlm.train import cli

BASE = Path(__file__).parents[3] / "recipes/assets/tiny_ar"
MASK, EOS = 170, 2
ROW_LENGTH = 500
NUM_SAMPLES, NUM_STEPS = 4, 8
LEARNING_RATE, WARMUP, MAX_NORM = 1e-4, 0.03, 1.0
STAGES = [(2, 0.2)] * 2 + [(3, 0.2)] * 2 + [(4, None)] * 4
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def texts() -> list[tuple[str, str]]:
    """Prompt and response of samples so alike in length that two of them, and never three, share a row."""
    task, index, found = TASKS.get("ledger")(level="tiny"), 0, []
    while len(found) < NUM_SAMPLES:
        sample = task.sample(index, "train")
        index += 1
        if ROW_LENGTH / 3 < num_rows(sample.prompt, sample.response) <= ROW_LENGTH / 2:
            found.append((sample.prompt, sample.response))
    return found


def encode(prompt: str, response: str) -> tuple[list[int], list[int]]:
    tokenizer = Tokenizer.from_file(str(BASE / "tokenizer.json"))
    return tokenizer.encode(prompt).ids, [*tokenizer.encode(response, add_special_tokens=False).ids, EOS]


def num_rows(prompt: str, response: str) -> int:
    prompt_ids, response_ids = encode(prompt, response)
    return len(prompt_ids) + 2 * len(response_ids)


def layout(prompt_ids: list[int], response_ids: list[int], stride: int) -> dict[str, torch.Tensor]:
    """`[x_t | x_0]` of one sample: position i is trained to say token i + 1 if that is a response token."""
    tokens = torch.tensor(prompt_ids + response_ids)
    length, first = len(tokens), len(prompt_ids) - 1
    index = torch.arange(length)
    is_trained = (index >= first) & (index < length - 1)
    block = torch.where(is_trained, index - (index - first) % (stride - 1), index)
    position, start = torch.cat([index, index]), torch.cat([block, block])
    noisy = torch.arange(2 * length) < length
    to_clean = ~noisy & torch.where(noisy[:, None], position < start[:, None], position <= position[:, None])
    to_noisy = (noisy[:, None] & noisy) & (start == start[:, None]) & (position <= position[:, None])
    return {
        "input_ids": torch.cat([torch.where(is_trained, MASK, tokens), tokens])[None],
        "position_ids": position[None],
        "attention_mask": (to_clean | to_noisy)[None, None],
        "labels": tokens[1:][is_trained[:-1]],
        "rows": torch.stack([index[is_trained], index[is_trained] + length]),
    }


def reference(texts: list[tuple[str, str]], *, balance: str) -> list[tuple[float, float, float]]:
    """(mask loss, clean loss, s) of every step."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        BASE, attn_implementation="sdpa", dtype=torch.float32
    ).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    shown, previous = [], None
    for step, (stride, fixed) in enumerate(STAGES):
        sums, count = [torch.zeros(()), torch.zeros(())], 0
        for prompt, response in texts:
            sample = layout(*encode(prompt, response), stride)
            labels, rows = sample.pop("labels"), sample.pop("rows")
            logits = model(**sample, use_cache=False).logits[0]
            for half in range(2):
                sums[half] = sums[half] + functional.cross_entropy(
                    logits[rows[half]], labels, reduction="sum"
                )
            count += len(labels)
        mask_loss, clean_loss = (total / count for total in sums)
        ratio = float(mask_loss.detach() / clean_loss.detach())
        s = fixed if fixed is not None else ratio if balance == "step" else previous
        previous = ratio
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * schedule(step)
        optimizer.zero_grad()
        (mask_loss + s * clean_loss).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        shown.append((float(mask_loss.detach()), float(clean_loss.detach()), s))
    return shown


def schedule(step: int) -> float:
    """Linear warm-up, whose first step trains too, then a cosine to zero."""
    num_warmup = math.ceil(WARMUP * NUM_STEPS)
    if step < num_warmup:
        return (step + 1) / num_warmup
    return 0.5 * (1 + math.cos(math.pi * (step - num_warmup) / (NUM_STEPS - num_warmup)))


def trained(
    texts: list[tuple[str, str]], directory: Path, *, batch_size: int, balance: str
) -> list[tuple[float, float, float]]:
    """The same of `idlm-train recipe=tiny` on a file of these samples; the first layer is recomputed."""
    lines = [json.dumps({"prompt": prompt, "response": response}) for prompt, response in texts]
    (directory / "data.jsonl").write_text("\n".join(lines) + "\n")
    stages = ", ".join(
        f"{{stride: {stride}, steps: {steps}, clean_weight: {s}}}"
        for stride, steps, s in ((2, 2, 0.2), (3, 2, 0.2), (4, 4, "auto"))
    )
    overrides = {
        "output_dir": directory / "out",
        "model.path": BASE,
        "model.mask_token_id": MASK,
        "model.gradient_checkpointing": "true",
        "model.recomputed_layers": 1,
        "data.source": "jsonl",
        "data.path": directory / "data.jsonl",
        "data.chat_template": "false",
        "train.stages": f"[{stages}]",
        "train.steps": "null",
        "train.batch_size": batch_size,
        "train.accumulation": NUM_SAMPLES // 2 // batch_size,
        "train.row_length": ROW_LENGTH,
        "train.balance": balance,
        "train.learning_rate": LEARNING_RATE,
        "train.threads": 1,
        "train.log_every": 1,
        "train.save_every": 1000,
        "report.enabled": "false",
    }
    assert cli.main(["recipe=tiny", *(f"{key}={value}" for key, value in overrides.items())]) == 0
    records = [json.loads(line) for line in (directory / "out/run/metrics.jsonl").read_text().splitlines()]
    return [(record["mask_loss"], record["clean_loss"], record["clean_weight"]) for record in records]


@pytest.mark.sweep_but(1)
@pytest.mark.parametrize(("batch_size", "balance"), [(2, "step"), (1, "previous")])
def test_eight_steps_of_the_tiny_recipe(
    texts: list[tuple[str, str]], tmp_path: Path, batch_size: int, balance: str
) -> None:
    mine = torch.tensor(trained(texts, tmp_path, batch_size=batch_size, balance=balance))
    theirs = torch.tensor(reference(texts, balance=balance))
    torch.testing.assert_close(mine, theirs, atol=TOLERANCE, rtol=TOLERANCE)
