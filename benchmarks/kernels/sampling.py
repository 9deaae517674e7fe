"""Sampling of one decoding step: probabilities, verification, correction, draws, storing drafts.

    python -m benchmarks.sampling [record=true] [sweep=chunk,tile] [batches=1,16,64,256] [strides=1,2,4,8]

Checks the kernels against the fp64 path first. Then it measures the read-only stream and, as CUDA graphs,
every op and the whole step, without filters, with those of Qwen3 (temperature 0.6, top_k 20, top_p 0.95) and
with top_p alone; torch's sort, softmax and cumsum of the same rows is the baseline. Random logits of the true
vocabulary; about nine of ten drafts pass. `sweep` names tunables (SWEPT) to try.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.options import parse_options
from benchmarks.results import append_rows, result_row
from benchmarks.stream import stream_rate
from idlm.cli import command
from idlm.errors import UserError
from idlm.kernels.sampling import (
    DraftProbs,
    LayoutTables,
    Probs,
    Tuning,
    Verdict,
    dense_probs,
    draft_probs,
    emit_and_draft,
    plain,
    put,
    row_probs,
    uniforms,
    verify,
)
from idlm.kernels.sampling.types import PlainDraftProbs

VOCABULARY = 151_936
REPEATS = 10
MAX_BASELINE_ROWS = 1024
SETTINGS = {
    "none": (1.0, 0, 1.0, 0.0),
    "qwen3": (0.6, 20, 0.95, 0.0),
    "top_p": (1.0, 0, 0.95, 0.0),
}
"""Temperature, top_k, top_p and min_p of each arm."""
SWEPT = {
    "tile": (4, 8, 16, 32),
    "num_warps": (2, 4, 8),
    "row_warps": (4, 8, 16),
    "chunk": (256, 512, 1024),
    "group": (4, 8, 16),
}
DEFAULTS = {
    "record": "false",
    "sweep": "",
    "rounds": "7",
    "batches": "1,16,64,256",
    "strides": "1,2,4,8",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The tensors of one step of B sequences: logits, settings and the lanes' state."""

    logits_XV: Tensor
    settings: tuple[Tensor, Tensor, Tensor, Tensor]
    filters: bool
    store: DraftProbs
    tables: LayoutTables
    lanes_B: Tensor
    first_B: Tensor
    active_B: Tensor
    drafts_ZJ: Tensor
    layout_Z: Tensor
    tau_Z: Tensor
    ints_Z: Tensor
    tuning: Tuning

    def uniforms(self) -> Tensor:
        """Random numbers of the step."""
        num_draws = 2 * self.drafts_ZJ.shape[1] + 1
        ints_Z = self.ints_Z
        return uniforms(self.lanes_B, ints_Z, ints_Z, num_draws, lanes_B=self.lanes_B)

    def probs(self) -> Probs:
        """Probabilities of all rows."""
        return row_probs(
            self.logits_XV, *self.settings, filters=self.filters, lanes_B=self.lanes_B, tuning=self.tuning
        )

    def verify(self, probs: Probs, uniforms_BD: Tensor) -> Verdict:
        """Test the drafts."""
        return verify(
            probs,
            self.store,
            self.tables,
            lanes_B=self.lanes_B,
            first_rows_B=self.first_B,
            active_B=self.active_B,
            drafts_ZJ=self.drafts_ZJ,
            tau_Z=self.tau_Z,
            layout_Z=self.layout_Z,
            uniforms_BJ=uniforms_BD,
        )

    def emit(self, probs: Probs, verdict: Verdict, uniforms_BD: Tensor) -> None:
        """Draw the token after the accepted drafts, and the next drafts."""
        emit_and_draft(
            probs,
            self.store,
            verdict,
            lanes_B=self.lanes_B,
            uniforms_BA=uniforms_BD[:, self.drafts_ZJ.shape[1] :],
            drafts_ZJ=self.drafts_ZJ,
            layout_Z=self.layout_Z,
        )

    def put(self, probs: Probs, verdict: Verdict) -> None:
        """Store the probabilities of the next drafts."""
        put(self.store, self.lanes_B, probs, verdict.draft_rows_BJ, active_B=self.active_B)

    def run(self) -> Verdict:
        """Run the whole step."""
        uniforms_BD, probs = self.uniforms(), self.probs()
        verdict = self.verify(probs, uniforms_BD)
        self.emit(probs, verdict, uniforms_BD)
        self.put(probs, verdict)
        return verdict


def main() -> int:
    """Console entry point."""
    return command.run(measure)


def measure(arguments: list[str]) -> int:
    """Check, measure, print a table and optionally record it."""
    options = parse_options(arguments, DEFAULTS)
    if not torch.cuda.is_available():
        raise UserError("IDLM-0543", "no CUDA device", fix="run benchmarks.kernels.sampling on a GPU")
    rounds = int(options["rounds"])
    mismatches = {arm: _mismatches(arm) for arm in SETTINGS}
    print(f"tokens and counts that differ from the fp64 path, of all (rounding at boundaries): {mismatches}")
    stream = stream_rate(rounds=rounds)
    print(f"read-only stream {stream / 1e12:.2f} TB/s")
    if options["sweep"]:
        _sweep(options["sweep"].split(","), rounds)
    rows: list[dict[str, Any]] = []
    print(f"\n{'B':>4} {'N':>2} {'arm':>6} {'rows':>5}" + "".join(f"{name:>10}" for name in _NAMES) + "  us")
    for num_sequences in map(int, options["batches"].split(",")):
        for stride in map(int, options["strides"].split(",")):
            for arm in SETTINGS:
                case = {"batch": num_sequences, "stride": stride, "filters": arm}
                times = _times(_make(num_sequences, stride, arm), rounds)
                rows += _rows(case, times, stream, gate=mismatches[arm] <= 0.01)
                print(_line(case, times, stream), flush=True)
    if options["record"] == "true":
        append_rows("sampling", rows)
    return 0


_NAMES = ("uniforms", "probs", "verify", "emit", "put", "step", "torch", "2 reads")


def _make(num_sequences: int, stride: int, arm: str, tuning: Tuning = Tuning()) -> Step:  # noqa: B008
    """A step whose verification rows are close to its mask rows, so that most drafts pass in every step."""
    num_masks, device = stride - 1, torch.device("cuda")
    width = 2 * num_masks + 1
    generator = torch.Generator(device=device).manual_seed(0)
    logits_BWV = torch.empty(num_sequences, width, VOCABULARY, dtype=torch.bfloat16, device=device)
    for rows_WV in logits_BWV:
        noise_WV = torch.randn(width, VOCABULARY, generator=generator, device=device)
        rows_WV[:] = 2.5 * noise_WV
        rows_WV[:num_masks] = rows_WV[num_masks + 1 :] + 0.15 * noise_WV[:num_masks]
    ints_Z = torch.zeros(num_sequences, dtype=torch.int64, device=device)
    floats_Z = ints_Z.double()
    temperature, top_k, top_p, min_p = SETTINGS[arm]
    draft_row_J = torch.arange(num_masks + 1, width, device=device)
    store = draft_probs(
        num_sequences, num_masks, VOCABULARY, dtype=torch.bfloat16, device=device, tuning=tuning
    )
    assert isinstance(store, DraftProbs)
    step = Step(
        logits_XV=logits_BWV.flatten(0, 1),
        settings=(floats_Z + temperature, ints_Z + top_k, floats_Z + top_p, floats_Z + min_p),
        filters=arm != "none",
        store=store,
        tables=LayoutTables(
            num_drafts_Y=torch.tensor([0, num_masks], device=device),
            draft_rows_YAJ=draft_row_J.expand(2, num_masks + 1, num_masks).contiguous(),
            next_layouts_YA=torch.full((2, num_masks + 1), min(num_masks, 1), device=device),
        ),
        lanes_B=torch.arange(num_sequences, device=device),
        first_B=torch.arange(num_sequences, device=device) * width,
        active_B=torch.ones(num_sequences, dtype=torch.bool, device=device),
        drafts_ZJ=torch.zeros(num_sequences, num_masks, dtype=torch.int64, device=device),
        layout_Z=ints_Z.clone(),
        tau_Z=floats_Z,
        ints_Z=ints_Z,
        tuning=tuning,
    )
    step.run()
    return step


def _mismatches(arm: str) -> float:
    """Share of accepted counts and drawn tokens that differ from the fp64 path; asserts that probs agree."""
    step = _make(16, 4, arm)
    settings = tuple(column.repeat_interleave(7) for column in step.settings)
    exact = plain.row_probs(step.logits_XV, settings, None, filters=step.filters)  # type: ignore[arg-type]
    probs, uniforms_BD = step.probs(), step.uniforms()
    error = float((dense_probs(probs) - exact.probs_XV).abs().max())
    # Rounding decides on which side of top_p a token at its edge falls.
    assert error < (1e-6 if arm == "none" else 1e-2), f"{arm=} {error=}"
    verdict = step.verify(probs, uniforms_BD)
    drafts_ZJ, layout_Z = step.drafts_ZJ.clone(), step.layout_Z.clone()
    step.emit(probs, verdict, uniforms_BD)
    store = PlainDraftProbs(probs_ZJV=exact.probs_XV.view(16, 7, VOCABULARY)[:, 4:].clone())
    columns = (step.lanes_B, step.first_B, step.active_B, drafts_ZJ, step.tau_Z, layout_Z)
    expected = plain.verify(exact, store, step.tables, columns, uniforms_BD)
    state = (step.drafts_ZJ.clone(), step.layout_Z.clone())
    plain.emit(exact, store, expected, step.lanes_B, uniforms_BD[:, 3])
    plain.draw_drafts(exact, expected, step.lanes_B, uniforms_BD[:, 4:], state, takes_best=False)
    differs = torch.cat(
        [
            (verdict.accepted_B != expected.accepted_B)[:, None],
            verdict.token_ids_BA != expected.token_ids_BA,
            step.drafts_ZJ != state[0],
        ],
        dim=1,
    )
    return float(differs.double().mean())


def _times(step: Step, rounds: int) -> dict[str, float]:
    """Microseconds of each op and of the step, replayed as graphs."""
    uniforms_BD, probs = step.uniforms(), step.probs()
    verdict = step.verify(probs, uniforms_BD)
    arms: dict[str, Callable[[], Any]] = {
        "uniforms": step.uniforms,
        "probs": step.probs,
        "verify": lambda: step.verify(probs, uniforms_BD),
        "emit": lambda: step.emit(probs, verdict, uniforms_BD),
        "put": lambda: step.put(probs, verdict),
        "step": step.run,
    }
    if len(step.logits_XV) <= MAX_BASELINE_ROWS:
        arms["torch"] = lambda: _torch_tokens(step)
    if not step.drafts_ZJ.shape[1]:
        del arms["put"]
    return {
        name: _microseconds(arm, rounds, repeats=1 if name == "torch" else REPEATS)
        for name, arm in arms.items()
    }


def _torch_tokens(step: Step) -> Tensor:
    """A token of every row by softmax and, with filters, a sort in fp32, as libraries do."""
    temperature, top_k, top_p, _ = (column[0] for column in step.settings)
    logits_XV = step.logits_XV.float() / temperature
    if not step.filters:
        cumulative_XV = logits_XV.softmax(-1).cumsum(-1)
        return (cumulative_XV < 0.5).sum(-1)
    sorted_XV, order_XV = logits_XV.sort(dim=-1, descending=True)
    places_V = torch.arange(VOCABULARY, device="cuda")
    sorted_XV = sorted_XV.where((places_V < top_k) | (top_k == 0), -torch.inf)
    probs_XV = sorted_XV.softmax(-1)
    probs_XV = probs_XV.where(probs_XV.cumsum(-1) - probs_XV < top_p, 0.0)
    cumulative_XV = probs_XV.cumsum(-1)
    place_X1 = (cumulative_XV < 0.5 * cumulative_XV[:, -1:]).sum(-1, keepdim=True)
    return order_XV.gather(-1, place_X1)[:, 0]


def _microseconds(run: Callable[[], Any], rounds: int, *, repeats: int = REPEATS) -> float:
    """Median over `rounds` of a replayed graph of `repeats` runs, per run."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            run()
    samples = []
    for _ in range(rounds + 1):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        samples.append(1e3 * start.elapsed_time(end) / repeats)
    return statistics.median(samples[1:])


def _two_reads(num_rows: int, stream: float) -> float:
    return 2 * num_rows * VOCABULARY * 2 / stream * 1e6


def _rows(
    case: dict[str, Any], times: dict[str, float], stream: float, *, gate: bool
) -> list[dict[str, Any]]:
    """Result rows: the step against reading the logits twice and against torch, and each op."""
    floor = _two_reads(case["batch"] * (2 * case["stride"] - 1), stream)
    shared: dict[str, Any] = {"gate_passed": gate, "command": "python -m benchmarks.sampling"}
    rows = [
        result_row(
            "sampling",
            case,
            "step_us",
            times["step"],
            "us",
            baseline=times.get("torch"),
            floor=floor,
            **shared,
        )
    ]
    ops = [name for name in times if name not in ("step", "torch")]
    return rows + [result_row("sampling", case, f"{name}_us", times[name], "us", **shared) for name in ops]


def _line(case: dict[str, Any], times: dict[str, float], stream: float) -> str:
    num_rows = case["batch"] * (2 * case["stride"] - 1)
    columns = {**times, "2 reads": _two_reads(num_rows, stream)}
    shown = "".join(f"{columns[name]:>10.1f}" if name in columns else f"{'-':>10}" for name in _NAMES)
    return f"{case['batch']:>4} {case['stride']:>2} {case['filters']:>6} {num_rows:>5}{shown}"


def _sweep(keys: list[str], rounds: int) -> None:
    """Vary one tunable at a time, with the others at their defaults."""
    print("\nsweep, N=4: us of probs / step")
    for key in keys:
        for value in SWEPT[key]:
            tuning = dataclasses.replace(Tuning(), **{key: value})
            cells = []
            for num_sequences, arm in ((1, "none"), (1, "qwen3"), (64, "none"), (64, "qwen3"), (64, "top_p")):
                step = _make(num_sequences, 4, arm, tuning)
                times = [_microseconds(run, rounds) for run in (step.probs, step.run)]
                cells.append(f"B={num_sequences} {arm} {times[0]:.1f}/{times[1]:.1f}")
            print(f"{key}={value}: " + "  ".join(cells), flush=True)


if __name__ == "__main__":
    sys.exit(main())
