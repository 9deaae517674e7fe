"""What grammars cost the host, without a model: the choice of drafts, for which the device waits, and the
masks, which the host computes meanwhile.

    python -m benchmarks.structured_host [sequences=1,16,64] [stride=4] [passes=60] [fitting=0,0.9]
        [vocabulary=random|FOLDER] [vocab_size=151936] [record=false]

Sequences answer under the schema of structured_load.py, each from a state of its own. In place of a model,
dice accept drafts and draw among the tokens that a mask allows. `fitting`: how often a first candidate is
such a draw too; all others are any tokens. 0 is the hard case that random weights make. `vocabulary`: random
words, or a folder with the files of a tokenizer. Rows, per pass: `choice_ms` and `bits_ms` as the engine sees
them; their CPU time (`.._cpu_ms`, of all threads) and its part under the interpreter's lock at most
(`.._lock_ms`, of the thread that calls), from which follows what more cores are worth.
"""

from __future__ import annotations

import json
import random
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.options import parse_options
from benchmarks.results import RESULTS, append_rows, result_row
from benchmarks.serving.structured_load import SCHEMA, write_vocabulary
from idlm.cli import command
from idlm.contracts import Constraint
from idlm.infer.decoders.isd import NUM_CANDIDATES
from idlm.infer.structured.draft_choice import Follower
from idlm.infer.structured.grammar import Grammar, GrammarCompiler
from idlm.infer.structured.masks import PassGrammars, follower_of
from idlm.text.tokenizer import load_tokenizer

DEFAULTS = {
    "sequences": "1,16,64",
    "stride": "4",
    "passes": "60",
    "fitting": "0,0.9",
    "vocabulary": "random",
    "vocab_size": "151936",
    "record": "false",
    "results": str(RESULTS),
}
COMMAND = "python -m benchmarks.structured_host"
ACCEPTED, MAX_APART = 0.8, 40
"""How often a draft is accepted; tokens by which the sequences' states are apart at first."""
Seconds = dict[str, list[float]]


def main() -> int:
    """Console entry point."""
    return command.run(measure)


def measure(arguments: list[str]) -> int:
    """Print and record the means over passes."""
    options = parse_options(arguments, DEFAULTS)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        if options["vocabulary"] == "random":
            write_vocabulary(path, int(options["vocab_size"]))
        else:
            path = Path(options["vocabulary"])
        tokenizer = load_tokenizer(path)
    compiler = GrammarCompiler(tokenizer, int(options["vocab_size"]), [tokenizer.eos_token_id])
    grammar = compiler.grammar(Constraint(kind="json_schema", text=json.dumps(SCHEMA)))
    rows = []
    for fitting in options["fitting"].split(","):
        for number in options["sequences"].split(","):
            load = Load(grammar, int(number), int(options["stride"]) - 1, float(fitting))
            seconds = load.run(int(options["passes"]))
            case = {"sequences": int(number), "stride": int(options["stride"]), "fitting": float(fitting)}
            for name, values in sorted(seconds.items()):
                value = 1e3 * statistics.mean(values)
                rows.append(result_row("serve", case, name, value, "ms", command=COMMAND))
                print(f"{name:16s} {value:8.3f} ms  {case}", flush=True)
    if options["record"] == "true":
        append_rows("serve", rows, results=Path(options["results"]))
    return 0


class Load:
    """Sequences whose passes are followed as the engine does it. `peer`: a grammar of each, after what it
    has emitted, from which the dice draw.
    """

    def __init__(self, grammar: Grammar, num_sequences: int, num_drafts: int, fitting: float) -> None:
        self.num_drafts, self.fitting, self.dice = num_drafts, fitting, random.Random(num_sequences)
        self.peers = [grammar.branch() for _ in range(num_sequences)]
        for place, peer in enumerate(self.peers):
            for _ in range(place % MAX_APART):
                peer.push([self.draw(peer)])
        self.committed = [peer.branch() for peer in self.peers]
        self.followers: list[Follower] = [follower_of(each) for each in self.committed]

    def draw(self, peer: Grammar) -> int:
        """A token that may follow."""
        bits = np.unpackbits(np.frombuffer(peer.matcher.compute_bitmask(), np.uint8), bitorder="little")
        return int(self.dice.choice(np.flatnonzero(bits[: peer.vocab_size])))

    def run(self, num_passes: int) -> Seconds:
        """Seconds of every pass, without the first ten, by name."""
        seconds, cpu = defaultdict[str, list[float]](list), torch.device("cpu")

        def timed(name: str, call: Callable[[], Any]) -> None:
            clocks = {"_ms": time.perf_counter, "_cpu_ms": time.process_time, "_lock_ms": time.thread_time}
            before = {suffix: clock() for suffix, clock in clocks.items()}
            call()
            for suffix, clock in clocks.items():
                seconds[name + suffix].append(clock() - before[suffix])

        for _ in range(num_passes + 10):
            followers = dict(enumerate(self.followers))
            grammars = PassGrammars(followers, list(followers), [])
            timed("choice", partial(grammars.choose_drafts, self.num_drafts))
            timed("bits", partial(grammars.bits, cpu))
            self.tell(grammars)
        return {name: values[10:] for name, values in seconds.items()}

    def tell(self, grammars: PassGrammars) -> None:
        """What a model would emit, and its next candidates."""
        emitted = [self.emit(*pair) for pair in zip(self.followers, self.peers, strict=True)]
        candidates = [self.candidates(peer) for peer in self.peers]
        num_emitted_B = torch.tensor([len(ids) for ids in emitted])
        width = 1 + self.num_drafts
        token_ids_BA = torch.tensor([[*ids, *[0] * (width - len(ids))] for ids in emitted])
        grammars.places_M = torch.arange(len(emitted))
        grammars.tell(num_emitted_B, token_ids_BA, torch.tensor(candidates))

    def emit(self, follower: Follower, peer: Grammar) -> list[int]:
        """Drafts until the dice reject one, and a draw."""
        emitted = list[int]()
        for draft in follower.drafts:
            if self.dice.random() > ACCEPTED or peer.matcher.validate_tokens([draft]) < 1:
                break
            emitted.append(draft)
            assert peer.push([draft])
        emitted.append(self.draw(peer))
        assert peer.push(emitted[-1:])
        return emitted

    def candidates(self, peer: Grammar) -> list[list[int]]:
        """Of each draft."""
        found, num_taken = list[list[int]](), 0
        while len(found) < self.num_drafts:
            found.append([self.dice.randrange(peer.vocab_size) for _ in range(NUM_CANDIDATES)])
            if num_taken == len(found) - 1 and self.dice.random() < self.fitting:
                found[-1][0] = self.draw(peer)
                num_taken += peer.push(found[-1][:1])
        peer.matcher.rollback(num_taken)
        return found


if __name__ == "__main__":
    raise SystemExit(main())
