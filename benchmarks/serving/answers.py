"""Tokens per second of a small model, whose host may be the limit: `Engine.generate`, and streams over HTTP.

    python -m benchmarks.answers [model=smollm2-135m] [readers=generate,http] [concurrency=256] [tokens=512]
        [top_p=0.9,1.0] [rounds=3] [device=cuda] [record=true]

So many prompts of 64 tokens at once, AR, temperature 1, random weights; the best of all rounds but the first.
Reader `http` streams completions of `idlm-serve`, with a chunk for each event of the engine. Its clients are
in this process and read bytes only, so that they do not hold up the server."""

from __future__ import annotations

import asyncio
import json
import random
import string
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.engine.tensor_parallel import write_checkpoint
from benchmarks.models import MODELS
from benchmarks.shared import Report, chosen, defaults, parse_options, start
from idlm.contracts import SamplingParams
from idlm.infer.clients.arms import launched, serve_program
from idlm.infer.engine import Engine
from idlm.infer.models.loader import DTYPES

DEFAULTS = defaults(
    "model=smollm2-135m readers=generate,http concurrency=256 tokens=512 top_p=0.9,1.0 rounds=3 device=cuda "
    "dtype=bfloat16 record=true"
)
PROMPT_TOKENS, FIRST_ID = 64, 5


def measure(arguments: list[str]) -> int:
    options = parse_options(arguments, DEFAULTS, needs_gpu="answers")
    readers = chosen(options, "readers", ("generate", "http"))
    model, num, length = options["model"], int(options["concurrency"]), int(options["tokens"])
    size, report = MODELS[model]["vocab_size"], Report("serve", options, "python -m benchmarks.answers")
    settings = {"device": options["device"], "max_num_seqs": num, "max_length": 2 * PROMPT_TOKENS + length}
    prompts = [
        [FIRST_ID + (31 * n + 7 * k) % (size - FIRST_ID - 1) for k in range(PROMPT_TOKENS)]
        for n in range(num)
    ]

    def add_rates(reader: str, answer: Callable[[dict[str, Any]], int]) -> None:
        for top_p in map(float, options["top_p"].split(",")):
            rates = list[float]()
            for _ in range(int(options["rounds"])):
                begin = time.perf_counter()
                num_tokens = answer({"top_p": top_p, "max_tokens": length, "ignore_eos": True})
                rates.append(num_tokens / (time.perf_counter() - begin))
            case = {"model": model, "engine": "idlm", "decoder": "ar", "load": reader, "concurrency": num}
            report.add({**case, "top_p": top_p}, "output_tokens_per_s", max(rates[1:]), "tokens/s")

    with tempfile.TemporaryDirectory(prefix="idlm-answers-") as home:
        path = Path(home, model)
        write_checkpoint(path, model, device=options["device"], dtype=DTYPES[options["dtype"]])
        save_tokenizer(path, size)
        if "generate" in readers:
            engine = Engine.from_pretrained(path, "ar", warmup="auto", **settings)
            add_rates("generate", partial(generate, engine, prompts))
            engine.close()
        if "http" in readers:
            words = [f"{name}={value}" for name, value in settings.items()]
            with launched(serve_program([f"model={path}", "decoder=ar", *words]), "/ready") as url:
                add_rates("http", partial(stream, int(url.rpartition(":")[2]), prompts))
    return report.status


def generate(engine: Engine, prompts: list[list[int]], fields: dict[str, Any]) -> int:
    """The number of tokens of `Engine.generate`."""
    params = [SamplingParams(**fields, seed=seed) for seed in range(len(prompts))]
    return sum(len(each.token_ids) for each in engine.generate(prompts, params))


def stream(port: int, prompts: list[list[int]], fields: dict[str, Any]) -> int:
    fields = {**fields, "stream": True, "stream_options": {"include_usage": True}}
    bodies = ({**fields, "prompt": prompt, "seed": seed} for seed, prompt in enumerate(prompts))

    async def read_all() -> int:
        return sum(await asyncio.gather(*(_read(port, body) for body in bodies)))

    return asyncio.run(read_all())


async def _read(port: int, body: dict[str, Any]) -> int:
    """The number of tokens of a stream, from its last chunk."""
    sent, tail = json.dumps(body).encode(), b""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 22)
    head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(sent)}\r\n\r\n"
    writer.write(head.encode() + sent)
    while data := await reader.read(1 << 16):
        tail = (tail + data)[-2000:]
    writer.close()
    assert b"data: [DONE]" in tail, tail
    return int(tail.split(b'"completion_tokens":')[1].split(b",")[0])


def save_tokenizer(path: Path, vocab_size: int) -> None:
    """Bytes, and words of 2 to 8 letters, as the tokenizer of a checkpoint with so large a vocabulary."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    rng, words = random.Random(0), dict.fromkeys(sorted(pre_tokenizers.ByteLevel.alphabet()))
    while len(words) < vocab_size - 1:
        letters = rng.choices(string.ascii_lowercase, k=rng.randint(2, 8))
        words["".join([*rng.choice(("\u0120", "")), *letters])] = None
    vocabulary = {word: number for number, word in enumerate(list(words)[: vocab_size - 1])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(f"{path}/tokenizer.json")
    Path(path, "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')


if __name__ == "__main__":
    start(measure, __doc__)
