"""What the host does for each sequence and pass: the real engine over a stub of the device, on a CPU.

    python -m benchmarks.host [decoders=ar,isd] [sequences=64,256] [readers=generate,stream] [stride=4]
        [passes=256] [rounds=3] [record=true]

The stub feeds nothing and emits `stride` arbitrary tokens (AR: one) for every sequence that decodes. Reader
`generate` is `Engine.generate`, `stream` takes the events of every step. Times are CPU time of this process
without the stub's, the least of all rounds, in us and in turns of a loop of plain Python, which other
machines can be compared by. Calls are those of Python functions; they do not depend on the machine."""

from __future__ import annotations

import itertools
import time

from benchmarks.shared import Report, defaults, numbers, parse_options, start
from tests.unit.engine.host import calls_of, stubbed

DEFAULTS = defaults(
    "decoders=ar,isd sequences=64,256 readers=generate,stream stride=4 passes=256 rounds=3 record=false"
)
LOOP_TURNS = 200_000


def loop_us() -> float:
    """CPU time of a turn of a loop of plain Python."""
    begin, table = time.process_time(), dict[int, int]()
    for number in range(LOOP_TURNS):
        table[number & 63] = table.get(number & 31, 0) + number
    return 1e6 * (time.process_time() - begin) / LOOP_TURNS


def measure(arguments: list[str]) -> int:
    options = parse_options(arguments, DEFAULTS)
    report, stride = Report("host", options), int(options["stride"])
    words = options["readers"].split(","), options["decoders"].split(","), numbers(options["sequences"])
    for reader, decoder, num in itertools.product(*words):
        run, stub = stubbed(
            decoder, reader, num_sequences=num, num_passes=int(options["passes"]), stride=stride
        )
        times, loops = list[float](), list[float]()
        for _ in range(int(options["rounds"])):
            stub.seconds, stub.num_pairs = 0.0, 0
            loops.append(loop_us())
            begin = time.process_time()
            run()
            times.append(1e6 * (time.process_time() - begin - stub.seconds) / stub.num_pairs)
        stub.num_pairs = 0
        calls = calls_of(run) / stub.num_pairs
        case = {"decoder": decoder, "tokens": stub.num_tokens, "sequences": num, "reader": reader}
        report.add(case, "us_per_sequence_step", min(times), "us")
        report.add(case, "loops_per_sequence_step", min(times) / min(loops), "loops")
        report.add(case, "calls_per_sequence_step", calls, "calls")
    return report.status


if __name__ == "__main__":
    start(measure, __doc__)
