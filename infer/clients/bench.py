"""`idlm-bench`: throughput and latencies of one load after another, of a checkpoint's decoder next to AR, or
of servers.

With a checkpoint the first arm decodes one token per pass (AR), and greedy answers of both decoders are
compared before any load: a decoder that changes them is not measured. Modules that import torch or httpx are
imported inside functions, so that help and configuration errors come at once."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import random
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from idlm.cli import command
from idlm.cli.help import show_default
from idlm.cli.progress import Progress
from idlm.errors import UserError
from idlm.infer.cli.config import EngineArguments, read_arguments
from idlm.infer.cli.help import EngineHelp
from idlm.infer.cli.output import AnswerFile, answer_file, exclusive_output
from idlm.infer.clients import arms
from idlm.infer.clients.arms import Arm
from idlm.infer.clients.config import BenchConfig, check_unused
from idlm.infer.clients.loads import (
    FIRST_ID,
    Load,
    aggregate,
    load_prompts,
    make_jobs,
    mixed_lengths,
    poisson_arrivals,
)
from idlm.infer.settings import EngineSettings

LISTS = ("concurrency", "rate", "url")
MIN_REQUESTS, WARM_TOKENS = 16, 32
PARITY = {"num": 4, "num_prompt_tokens": 64, "num_tokens": 32}
"""Prompts of the parity gate, and the tokens of each prompt and answer."""
RATE = "mean_output_throughput_tokens_per_s"
HEADINGS = (
    *("arm", "load", "at once", "done", "failed", "tok/s", "x first", "tok/pass"),
    *("TTFT p50", "p95", "p99", "TPOT p50", "ITL p50", "p95", "p99"),
)
FILE_WIDTH = 200
RANDOM_NOTE = ", after which drafts fail more often than in text (prompts=text or FILE)"


class ArmPlan(NamedTuple):
    name: str
    open: Callable[[], AbstractContextManager[Arm]]


HELP = EngineHelp.of("idlm-bench", BenchConfig)


def main() -> int:
    return command.run(bench)


def bench(arguments: list[str]) -> int:
    """Run the command; returns the exit status, which is 1 if a request failed."""
    if command.has_help_flag(arguments):
        return HELP.print(arguments)
    words = list(map(with_brackets, arguments))
    config, engine_arguments = read_arguments("bench", BenchConfig, words)
    check_unused(config, engine_arguments)
    plot_to = config.plot
    if plot_to and not (plot_to.endswith((".png", ".svg", ".pdf")) and Path(plot_to).parent.is_dir()):
        fix = "name a .png, .svg or .pdf in an existing folder"
        raise UserError("IDLM-0442", f"cannot write plot={plot_to!r}", fix=fix)
    with exclusive_output(config.output, overwrite=config.overwrite):
        rows = _measure_all(config, plan_arms(config, engine_arguments, words))
    if plot_to:
        plot(rows, plot_to)
    print_table(rows)
    return int(any(row["num_error_requests"] for row in rows))


def with_brackets(argument: str) -> str:
    """`concurrency=1,4` as the list that it means."""
    key, equals, value = argument.partition("=")
    is_bare = equals and key in LISTS and not value.startswith("[") and value != "null"
    return f"{key}=[{value}]" if is_bare else argument


def plan_arms(config: BenchConfig, arguments: EngineArguments, words: Sequence[str]) -> list[ArmPlan]:
    """The arms, in order. Checks the settings before a model is loaded."""
    options: dict[str, Any] = {"api_key": config.api_key, "timeout": config.timeout}
    if config.url:
        from idlm.infer.clients.http import Server

        servers = [Server(url, model=config.model, **options) for url in config.url]
        already_open: Any = nullcontext
        running = [arms.ServerArm(server.address, server) for server in servers]
        return [ArmPlan(arm.name, partial(already_open, arm)) for arm in running]
    if config.max_num_seqs is None and config.concurrency and not config.rate:
        maximum = max(config.concurrency)
        config = dataclasses.replace(config, max_num_seqs=maximum)
        arguments = dataclasses.replace(arguments, settings={**arguments.settings, "max_num_seqs": maximum})
        words = [*words, f"max_num_seqs={maximum}"]
    plans = []
    for name, each in decoder_arms(config, arguments):
        opened: Any = partial(arms.engine_arm, name, each)
        if config.api == "http":
            program = arms.serve_program(_engine_words(words, each))
            opened = partial(arms.served_arm, name, program, "/ready", **options)
        plans.append(ArmPlan(name, opened))
    return plans


def decoder_arms(config: BenchConfig, arguments: EngineArguments) -> list[tuple[str, EngineArguments]]:
    """The decoder with one token per pass, and then the requested one if it is another one."""
    from idlm.infer.decoders.base import choose_decoder
    from idlm.infer.evaluation.arms import AUTO, choose_baseline
    from idlm.infer.models.loader import read_outline

    semantics = read_outline(
        arguments.model, dtype=config.dtype, mask_token_id=config.mask_token_id, base=config.base
    ).semantics
    decoder = choose_decoder(arguments.decoder, semantics).name
    chosen = dataclasses.replace(arguments, decoder=decoder)
    baseline = choose_baseline(AUTO, semantics)
    if baseline is None:
        return [(decoder, chosen)]
    baseline = baseline.with_decoder(decoder, arguments.options)
    is_same = baseline.is_decoder(decoder, arguments.options) and not arguments.settings["accelerators"]
    return [(baseline.name, baseline.arguments(arguments)), *([] if is_same else [(decoder, chosen)])]


def _engine_words(words: Sequence[str], arguments: EngineArguments) -> list[str]:
    """The arguments of a server with the decoder and the accelerators of `arguments`."""
    own = {each.name for each in dataclasses.fields(BenchConfig)} - {"model"}
    own -= {each.name for each in dataclasses.fields(EngineSettings)}
    left_out = {"decoder", "sampling", *([] if arguments.settings["accelerators"] else ["accelerators"])}
    keys = [word.lstrip("+").partition("=")[0] for word in words]
    kept = [
        word
        for key, word in zip(keys, words, strict=True)
        if key not in own and key.partition(".")[0] not in left_out
    ]
    options = [f"decoder.{key}={show_default(value)}" for key, value in arguments.options.items()]
    return [*kept, f"decoder={arguments.decoder}", *options]


def make_loads(config: BenchConfig) -> list[Load]:
    closed: list[tuple[int | None, float | None]] = [(each, None) for each in config.concurrency]
    texts = [] if config.prompts == "random" else load_prompts(config.prompts)
    return [_make_load(config, texts, *each) for each in [(None, rate) for rate in config.rate] or closed]


def _make_load(config: BenchConfig, texts: list[Any], concurrency: int | None, rate: float | None) -> Load:
    num = config.num_requests or max(MIN_REQUESTS, 2 * (concurrency or 0))
    rng = random.Random(config.seed)
    lengths, scenario = [(config.input_tokens, config.output_tokens)] * num, "mixed"
    if config.load == "mixed":
        lengths = mixed_lengths(num, scale=config.scale, rng=rng)
    else:
        scenario = f"D({config.input_tokens},{config.output_tokens})"
    rng, ignores = random.Random(f"{config.seed} {concurrency} {rate}"), config.ignore_eos
    jobs = make_jobs(
        lengths,
        dataclasses.replace(config.sampling, ignore_eos=not texts if ignores is None else ignores),
        ids=range(FIRST_ID, config.vocab_size),
        # Other prompts than those of the other loads, whose KV may still be in a prefix cache.
        rng=rng,
        is_chat=config.endpoint == "chat",
    )
    if texts:
        chosen = itertools.cycle(rng.sample(texts, len(texts)))
        jobs = [job._replace(prompt=text) for job, text in zip(jobs, chosen)]
        scenario = Path(config.prompts).name
    arrivals = [] if rate is None else poisson_arrivals(num, rate, rng=random.Random(config.seed))
    return Load(scenario, jobs, concurrency, rate, arrivals)


def _measure_all(config: BenchConfig, plans: Sequence[ArmPlan]) -> list[dict[str, Any]]:
    """All loads on all arms, one arm after another; returns the rows, which are also written."""
    from idlm.fingerprint import run_fingerprint

    loads, rows, first = make_loads(config), list[dict[str, Any]](), list[Any]()
    with contextlib.ExitStack() as stack:
        output: AnswerFile | None = None
        if config.output is not None:
            output = stack.enter_context(answer_file(config.output))
        for plan in plans:
            _log(f"{plan.name}  starts")
            with plan.open() as arm:
                parity = check_gate(arm, loads[0], first)
                for load in loads:
                    about = {"arm": arm.name, "prompts": config.prompts, **arm.case}
                    row = {**about, "parity_tokens": parity, **measure(arm, load)}
                    # The first arm's row under this load.
                    same = [each for each in rows if each["num_concurrency"] == row["num_concurrency"]]
                    row["over_first"] = row[RATE] / same[0][RATE] if same and same[0][RATE] else None
                    rows.append(row)
                    if output is not None:
                        output.write({**row, "client": run_fingerprint()})
    return rows


def check_gate(arm: Arm, load: Load, first: list[Any]) -> int | None:
    """Compare greedy answers of an arm with those of the first arm (`first`); returns how many tokens were
    compared. None for other servers, other ways of decoding than ar and isd, and lossy settings."""
    is_comparable = arm.case.get("decoder") in ("ar", "isd") and arm.case.get("exactness") == "exact"
    jobs = arms.greedy_jobs(load.jobs, **PARITY)
    if not first:
        is_plain = is_comparable and arm.case["decoder"] == "ar"
        first.append(arm.greedy(jobs) if is_plain else None)
    elif first[0] is not None and is_comparable:
        return arms.check_parity(first[0], arm.greedy(jobs), rounding=arm.rounding)
    return None


def measure(arm: Arm, load: Load) -> dict[str, Any]:
    """Figures of one load, after requests with short answers that warm the arm up."""
    num = load.concurrency or MIN_REQUESTS
    short = [
        job.backwards(dataclasses.replace(job.params, max_tokens=WARM_TOKENS)) for job in load.jobs[:num]
    ]
    title = f"{arm.name} " + (f"{load.rate:g}/s" if load.concurrency is None else f"C={load.concurrency}")
    with Progress(f"{title} warm-up", total=len(short)) as progress:
        arm.run(Load("warm-up", short, concurrency=num), on_done=progress.update)
    with Progress(title, total=len(load.jobs)) as progress:
        row = aggregate(arm.run(load, on_done=progress.update), load)
    _log(f"{title}  {row['num_completed_requests']} requests done in {row['run_duration']:.1f} s")
    return row


def _log(text: str) -> None:
    """Print progress where there is no bar."""
    if not sys.stderr.isatty():
        print(text, file=sys.stderr, flush=True)


def print_table(rows: Sequence[dict[str, Any]]) -> None:
    """Print a line for each arm and load; what failed first is printed above it."""
    for row in rows:
        if row["num_error_requests"]:
            label = f"{row['arm']}, {_at_once(row)}: {row['num_error_requests']} of {row['num_requests']}"
            print(f"{label} requests failed; the first one: {row['first_error']}", file=sys.stderr)
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = FILE_WIDTH
    table = Table(box=None, pad_edge=False)
    for number, heading in enumerate(HEADINGS):
        table.add_column(heading, justify="left" if number < 2 else "right", no_wrap=not console.is_terminal)
    for row in rows:
        table.add_row(*_cells(row))
    console.print(table)
    units = "tok/s: output tokens; x first: over the first arm; tok/pass: per forward pass; times in ms"
    console.print(units)
    console.print(f"prompts: {rows[0]['prompts']}{RANDOM_NOTE if rows[0]['prompts'] == 'random' else ''}")


def _cells(row: dict[str, Any]) -> list[str]:
    stats = row["stats"]
    latencies = [stats["ttft"][each] for each in ("p50", "p95", "p99")]
    latencies += [stats["tpot"]["p50"], *(stats["itl"][each] for each in ("p50", "p95", "p99"))]
    return [
        row["arm"],
        row["scenario"],
        _at_once(row),
        str(row["num_completed_requests"]),
        str(row["num_error_requests"]),
        f"{row[RATE]:,.0f}",
        _number(row["over_first"], "x"),
        _number(row["tokens_per_forward"]),
        *("-" if value is None else f"{1e3 * value:.1f}" for value in latencies),
    ]


def _at_once(row: dict[str, Any]) -> str:
    rate = row["arrival_requests_per_second"]
    return str(row["num_concurrency"]) if rate is None else f"{rate:g}/s"


def _number(value: float | None, unit: str = "") -> str:
    return "-" if value is None else f"{value:.2f}{unit}"


def plot(rows: Sequence[dict[str, Any]], path: str) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    loads = sorted({row["num_concurrency"] for row in rows})
    left, right = figure.subplots(1, 2)
    for number, name in enumerate(dict.fromkeys(row["arm"] for row in rows)):
        own = [row for row in rows if row["arm"] == name]
        counts, colour = [row["num_concurrency"] for row in own], f"C{number}"
        left.plot(counts, [row[RATE] for row in own], marker="o", color=colour, label=name)
        for metric, line in (("ttft", "--"), ("tpot", "-")):
            values = [float("nan") if (v := row["stats"][metric]["p50"]) is None else 1e3 * v for row in own]
            right.plot(counts, values, line, marker="o", color=colour, label=f"{name} {metric.upper()}")
    is_open = rows[0]["arrival_requests_per_second"] is not None
    for axes, title in ((left, "output tokens/s"), (right, "median ms")):
        axes.set(title=title, xlabel="arrivals/s" if is_open else "requests at a time", xscale="log", ylim=0)
        axes.set_xticks(loads, [f"{load:g}" for load in loads])
        axes.minorticks_off()
        axes.legend()
    figure.savefig(path)


if __name__ == "__main__":
    sys.exit(main())
