"""Memory and time of one full-diffusion step: longest canvas, step time, and how good the plans are.

    python -m benchmarks.memory [quick=true] [models=llada_8b] [arms=ARM,..] [caps=24] [shares=0.1,0.5,0.9]
        [parts=l_max,step,timeline] [allocators=default,expandable] [lengths=8192,32768] [layers=0]
        [probe_layers=2] [budget_s=570] [timeout_s=540] [figures=FOLDER] [record=true]

It needs a GPU. Models of true shapes have random bf16 weights. Every arm runs in a fresh process under a cap
that binds all of them (`canvas/card.py`). Arms of libraries: native_fp64, native, compile, masked,
compile_masked (`canvas/native.py`). Ours: paper (attention whole, 48 KiB a token of LLaDA-8B), mosaic
(attention whole, planned), ours (query chunks).
Part `l_max` bisects with `probe_layers` layers, the other layers' weights as ballast. Part `step` runs
`layers` layers (0: all); its floor is linear FLOPs at the rate of the best library product plus attention
FLOPs at the rate of the best library attention, both of this run. Arms that fail, are late or get no memory
are printed with the reason. No part starts after `budget_s`. `quick` fits into 5 minutes of one H200."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.engine.canvas.native import NATIVE_ARMS
from benchmarks.engine.canvas.sizes import attention_flops, length_floor, linear_flops, num_masks
from benchmarks.engine.canvas.tasks import ARMS, Task, TaskFailedError, run_in_process
from benchmarks.models import MODELS, model_spec
from benchmarks.results import read_rows, save_svg
from benchmarks.shared import Report, chosen, defaults, numbers, parse_options, print_absent, start

ALLOCATORS = {"default": False, "expandable": True}
DEFAULTS = defaults(
    "quick=false models=llada_8b caps=24 shares=0.1,0.5,0.9 "
    "parts=l_max,step,timeline lengths=8192,32768 layers=0 probe_layers=2 "
    "budget_s=570 timeout_s=540 device=cuda dtype=bfloat16 figures= record=true",
    arms=",".join(ARMS),
    allocators=",".join(ALLOCATORS),
)
QUICK = {
    "arms": "ours,mosaic,masked,native,compile",
    "shares": "0.5",
    "parts": "l_max,step",
    "allocators": "expandable",
    "layers": "8,0",
    "budget_s": "285",
}
TIMELINE_LENGTH, TIMELINE_LAYERS = 16_384, 4
MIN_SECONDS = 15.0
"""Nothing is started with less time than this."""
STRONG = ("masked", "compile_masked")
"""The arms of libraries that judge ours: logits of masks only, and no softmax stored."""
OURS = ("paper", "mosaic", "ours")
OVER_SHARE = 0.5
"""Prompt share at which longest canvases are compared."""
PHYSICAL_SLACK = 64 << 20


@dataclass(slots=True)
class Session:
    """One run of a model: its options, what it could not measure, and its rows to come.

    A row names the GPU, and reading the name may leave a context of this process on it. So rows are made
    after the last measurement."""

    options: dict[str, str]
    model: str
    deadline: float
    pending: list[tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)
    absent: dict[str, str] = field(default_factory=dict)

    def add(self, case: dict[str, Any], metric: str, value: float, unit: str, **more: Any) -> None:
        self.pending.append(((case, metric, value, unit), more))

    def measured(self, kind: str, arm: str = "", **fields: Any) -> dict[str, Any] | None:
        """The answer of a task in a fresh process; None, with a printed reason, if there is none."""
        device, dtype = self.options["device"], self.options["dtype"]
        task = Task(kind=kind, model=self.model, arm=arm, device=device, dtype=dtype, **fields)
        label = " ".join(part for part in (kind, self.model, arm, f"share={task.prompt_share}") if part)
        label += (f" cap={task.cap_gib:g}" if task.cap_gib else "") + " expandable" * task.expandable
        seconds = min(self.deadline - time.monotonic(), float(self.options["timeout_s"]))
        if seconds < MIN_SECONDS:
            self.absent[label] = "no time left; raise budget_s or choose fewer parts"
            return None
        try:
            answer = run_in_process(task, timeout_s=seconds)
        except TaskFailedError as error:
            self.absent[label] = str(error)
            print(f"{label}: {error}", flush=True)
            return None
        shown = {key: value for key, value in answer.items() if key not in ("points", "probes")}
        print(f"{label}: {shown}", flush=True)
        return answer

    @property
    def arms(self) -> list[str]:
        return self.options["arms"].split(",")

    @property
    def shares(self) -> list[float]:
        return [float(share) for share in self.options["shares"].split(",")]

    def allocators(self, arm: str) -> list[str]:
        """Both allocators for arms of libraries; our arms hold one workspace, so one allocator is enough."""
        names = self.options["allocators"].split(",")
        return names if arm in NATIVE_ARMS else names[:1]


def measure(arguments: list[str]) -> int:
    is_quick = parse_options(arguments, DEFAULTS)["quick"] == "true"
    options = parse_options(arguments, DEFAULTS | (QUICK if is_quick else {}), needs_gpu="memory")
    models, parts = chosen(options, "models", MODELS), chosen(options, "parts", PARTS)
    chosen(options, "arms", ARMS)
    chosen(options, "allocators", ALLOCATORS)
    deadline = time.monotonic() + float(options["budget_s"])
    sessions = [Session(options, model, deadline) for model in models]
    try:
        for session in sessions:
            for part in parts:
                PARTS[part](session)
    finally:
        for session in sessions:
            # Cases of some metrics have no model, so the command names it.
            words = [f"models={session.model}"] * (session.model != "llada_8b") + ["quick=true"] * is_quick
            report = Report("memory", options, " ".join(["python -m benchmarks.memory", *words]))
            for row, more in session.pending:
                report.add(*row, **more)
            print_absent(session.absent)
    if options["figures"]:
        draw(Path(options["results"]), Path(options["figures"]))
    return 0


def measure_l_max(session: Session) -> None:
    model, layers = session.model, int(session.options["probe_layers"])
    for text in session.options["caps"].split(","):
        cap: float = int(text) if text.isdigit() else float(text)
        for share in session.shares:
            found: dict[tuple[str, str], int] = {}
            for arm in session.arms:
                guess = round(0.97 * length_floor(model_spec(model), arm, share, cap))
                sizes: dict[str, Any] = {"prompt_share": share, "length": guess, "cap_gib": cap}
                for allocator in session.allocators(arm):
                    is_expandable = ALLOCATORS[allocator]
                    answer = session.measured("l_max", arm, layers=layers, expandable=is_expandable, **sizes)
                    if answer is not None:
                        found[arm, allocator] = answer["length"]
            add_l_max(session, cap, share, found)


def add_l_max(session: Session, cap: float, share: float, found: dict[tuple[str, str], int]) -> None:
    """Rows of the lengths of one cap and prompt share by (arm, allocator). The baseline of our arms is the
    longest canvas of the masked arms; `l_max_over` is the length of `ours` over the best of each other arm.
    """
    strong = max((length for (arm, _), length in found.items() if arm in STRONG), default=None)
    best: dict[str, int] = {}
    for (arm, allocator), length in found.items():
        case = {"model": session.model, "cap_gib": cap, "prompt_share": share, "arm": arm}
        case["allocator"] = allocator
        floor = length_floor(model_spec(session.model), arm, share, cap)
        baseline = strong if arm in OURS else None
        session.add(case, "l_max_tokens", length, "tokens", baseline=baseline, floor=floor)
        best[arm] = max(best.get(arm, 0), length)
    for arm, length in best.items():
        if share == OVER_SHARE and arm != "ours" and length and best.get("ours"):
            case = {"model": session.model, "cap_gib": cap, "arm": arm}
            session.add(case, "l_max_over", best["ours"] / length, "x")


def measure_steps(session: Session) -> None:
    """Step time of every arm at every length and prompt share, for each choice of layers."""
    lengths = tuple(numbers(session.options["lengths"]))
    rates = session.measured("rates", lengths=lengths)
    for layers in numbers(session.options["layers"]):
        for share in session.shares:
            found: dict[tuple[int, str], float] = {}
            for arm in session.arms:
                for allocator in session.allocators(arm):
                    sizes = {"prompt_share": share, "lengths": lengths, "layers": layers}
                    answer = session.measured("step", arm, expandable=ALLOCATORS[allocator], **sizes)
                    for length, timed in (answer or {"lengths": {}})["lengths"].items():
                        if "reason" in timed:
                            label = f"step {session.model} {arm} {allocator} length={length}"
                            session.absent[label] = timed["reason"]
                        else:
                            key = (int(length), arm)
                            found[key] = min(timed["ms"], found.get(key, timed["ms"]))
            add_steps(session, layers, share, rates, found)


def add_steps(
    session: Session,
    layers: int,
    share: float,
    rates: dict[str, Any] | None,
    found: dict[tuple[int, str], float],
) -> None:
    """Rows of milliseconds by (length, arm). The baseline of our arms is the faster masked arm."""
    spec = model_spec(session.model, num_layers=layers or None)
    is_whole = spec == model_spec(session.model)
    for (length, arm), ms in found.items():
        floor = None
        if rates is not None and rates["attention"][str(length)]:
            linears = linear_flops(spec, length, num_masks(length, share)) / rates["matmul"]
            floor = 1e3 * (linears + attention_flops(spec, length) / rates["attention"][str(length)])
        strong = min((found[length, name] for name in STRONG if (length, name) in found), default=None)
        case = {"model": session.model, "length": length, "prompt_share": share, "arm": arm}
        case |= {} if is_whole else {"layers": layers}
        session.add(case, "step_ms", ms, "ms", baseline=strong if arm in OURS else None, floor=floor)


def measure_timelines(session: Session) -> None:
    """Each arm's use of memory at 16K, and the points of its timeline."""
    found = {}
    for arm in session.arms:
        is_expandable = ALLOCATORS[session.allocators(arm)[-1]]
        sizes = {"length": TIMELINE_LENGTH, "layers": TIMELINE_LAYERS}
        answer = session.measured("timeline", arm, expandable=is_expandable, **sizes)
        if answer is not None:
            found[arm] = answer
            add_timeline(session, arm, answer)
    if session.options["record"] == "true" and found:
        save_timelines(found, Path(session.options["results"]))


def add_timeline(session: Session, arm: str, answer: dict[str, Any]) -> None:
    """Rows of one timeline: peak over average, reserved over live, and those of a plan."""
    case, live = {"arm": arm}, answer.get("planned_live_bytes", answer["live_bytes"])
    session.add(case, "peak_over_average", answer["peak_over_average"], "x")
    session.add(case, "reserved_over_live", answer["reserved_bytes"] / live, "x")
    if "planned_bytes" in answer:
        over, is_exact = answer["workspace_bytes"] / live, answer["workspace_bytes"] <= 1.01 * live
        session.add(case, "planned_over_live", over, "x", gate_passed=is_exact)
        physical, planned = answer["physical_bytes"], answer["planned_bytes"]
        is_met = physical <= 1.01 * planned + PHYSICAL_SLACK
        session.add(case, "physical_over_planned", physical / planned, "x", gate_passed=is_met)


PARTS: dict[str, Callable[[Session], None]] = {
    "l_max": measure_l_max,
    "step": measure_steps,
    "timeline": measure_timelines,
}


TIMELINES = "memory_timeline.json"
MODEL, CAP_GIB, SHARE = "llada_8b", 24, 0.5
"""Whose longest canvases are drawn."""
MIB = 1 << 20


def save_timelines(found: Mapping[str, dict[str, Any]], results: Path) -> Path:
    """Add the points of each arm to the file of timelines; those of other arms stay."""
    path = results / TIMELINES
    points = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    points |= {arm: {"points": answer["points"]} for arm, answer in found.items() if answer["points"]}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(points) + "\n", "utf-8")
    return path


def draw(results: Path, folder: Path) -> None:
    """Draw the recorded longest canvases, and one timeline per arm."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.5))
    axes, best = figure.add_subplot(), _best_l_max(results)
    axes.barh(list(best), list(best.values()))
    for index, value in enumerate(best.values()):
        axes.annotate(f" {value:,.0f}", (value, index), va="center", fontsize=8)
    title = f"{MODEL}, {CAP_GIB} GiB, prompt share {SHARE}"
    axes.set(xscale="log", xlabel="longest canvas, tokens", title=title)
    save_svg(figure, folder / f"memory_l_max_{MODEL}_{CAP_GIB}gib.svg")
    timelines = json.loads((results / TIMELINES).read_text("utf-8"))
    figure = Figure(figsize=(7, 2 * len(timelines)))
    for index, (arm, line) in enumerate(timelines.items(), start=1):
        axes = figure.add_subplot(len(timelines), 1, index)
        times, sizes = zip(*line["points"], strict=True)
        share = [100 * (time - times[0]) / max(1e-9, times[-1] - times[0]) for time in times]
        axes.fill_between(share, [size / MIB for size in sizes], step="post")
        axes.set(ylabel="MiB alive", title=arm, xlim=(0, 100))
    axes.set_xlabel("percent of a step, 16K tokens")
    figure.tight_layout()
    save_svg(figure, folder / "memory_timelines.svg")


def _best_l_max(results: Path) -> dict[str, float]:
    newest: dict[tuple[str, str], float] = {}
    wanted = {"model": MODEL, "cap_gib": CAP_GIB, "prompt_share": SHARE}
    for row in read_rows("memory", results=results):
        is_wanted = row["metric"] == "l_max_tokens" and row["gate_passed"] is not False
        if is_wanted and wanted.items() <= row["case"].items():
            newest[row["case"]["arm"], row["case"]["allocator"]] = row["value"]
    best: dict[str, float] = {}
    for (arm, _), value in newest.items():
        best[arm] = max(best.get(arm, 0), value)
    return dict(sorted(best.items(), key=lambda item: item[1]))


if __name__ == "__main__":
    start(measure, __doc__)
