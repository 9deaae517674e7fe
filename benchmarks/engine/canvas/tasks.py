"""What one process measures: a task names an arm, its shapes and its cap; the answer is plain JSON.

Every task runs in a fresh process, which is given it as JSON, its only argument, and takes a ballast that
leaves the task's cap of the card. The process prints one line that starts with `MARK` and holds the answer,
or the reason of its failure. The allocator is chosen by the environment, before torch is imported.
Shapes: L positions, N heads, H head dim."""

from __future__ import annotations

import json
import math
import os
import signal
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.engine.canvas import card
from benchmarks.engine.canvas.card import Search, fewer_points, longest, peak_over_average, timeline_of
from benchmarks.engine.canvas.executor import PRODUCT_ARMS, ExecutorArm
from benchmarks.engine.canvas.native import NATIVE_ARMS, Canvas, NativeArm, random_canvas, random_native
from benchmarks.engine.canvas.sizes import ITEM_BYTES, layer_weights
from benchmarks.models import MODELS, family_of, model_spec
from benchmarks.stream import matmul_rate
from idlm.devices import free_cached_memory
from idlm.errors import UserError

ARMS = (*NATIVE_ARMS, *PRODUCT_ARMS)
WARM_UP_LENGTHS = (512, 768)
"""Two lengths, so that a compiler sees that the length varies before anything is measured."""
TIMED_SECONDS, MIN_STEPS, MAX_STEPS = 1.5, 3, 20
ATTENTION_BACKENDS = (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION)
REPEATS = 5
LIMIT = 1 << 22
"""No longer canvas is tried."""
MARK = "ANSWER "
ROOT = Path(__file__).resolve().parents[3]
MAX_REASON = 300
PROGRAM = ("-m", "benchmarks.engine.canvas.tasks")
Arm = NativeArm | ExecutorArm
Answer = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """`layers` 0: all of the model; `cap_gib` 0: no cap. `length` is the guess of a search for L_max."""

    kind: str
    model: str
    arm: str = ""
    prompt_share: float = 0.5
    length: int = 0
    lengths: tuple[int, ...] = ()
    layers: int = 0
    cap_gib: float = 0.0
    expandable: bool = False
    device: str = "cuda"
    dtype: str = "bfloat16"

    @property
    def torch_device(self) -> torch.device:
        return torch.device(self.device)


class TaskFailedError(RuntimeError):
    """A task has no answer; the message is the reason."""


def run_in_process(task: Task, *, timeout_s: float, program: tuple[str, ...] = PROGRAM) -> Answer:
    """The answer of a task in a fresh process; raises TaskFailedError with the reason if there is none.

    `program` gets the task as its last argument."""
    path = os.pathsep.join(part for part in (str(ROOT), os.environ.get("PYTHONPATH", "")) if part)
    environment = {**os.environ, "PYTHONPATH": path}
    environment["PYTORCH_ALLOC_CONF"] = f"expandable_segments:{task.expandable}"
    if task.kind == "timeline":
        # Then times of the host are times of the device.
        environment["CUDA_LAUNCH_BLOCKING"] = "1"
    with subprocess.Popen(
        [sys.executable, *program, json.dumps(asdict(task))],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            output, errors = process.communicate(timeout=timeout_s)
        except BaseException as error:
            # A compiler has processes of its own.
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            if isinstance(error, subprocess.TimeoutExpired):
                raise TaskFailedError(f"no answer in {timeout_s:.0f} s") from error
            raise
    lines = [line for line in output.splitlines() if line.startswith(MARK)]
    if not lines:
        last = (errors.strip().splitlines() or ["no output"])[-1]
        raise TaskFailedError(f"status {process.returncode}: {last[:MAX_REASON]}")
    answer: Answer = json.loads(lines[-1].removeprefix(MARK))
    if "error" in answer:
        raise TaskFailedError(answer["error"])
    return answer


def main(arguments: list[str]) -> int:
    """Run the task and print its answer; the status is 0 if there is one."""
    fields = json.loads(arguments[0])
    task = Task(**{**fields, "lengths": tuple(fields["lengths"])})
    try:
        answer, status = KINDS[task.kind](task), 0
    except Exception as error:
        traceback.print_exc()
        first_line = str(error).strip().partition("\n")[0]
        answer, status = {"error": f"{type(error).__name__}: {first_line}"[:MAX_REASON]}, 1
    print(MARK + json.dumps(answer), flush=True)
    return status


def open_arm(task: Task) -> Arm:
    """The arm of a task on its device, after the ballast; it has run two lengths, so that what a step needs
    is loaded and compiled."""
    device, dtype = task.torch_device, getattr(torch, task.dtype)
    whole, spec = model_spec(task.model), model_spec(task.model, num_layers=task.layers or None)
    if device.type == "cuda":
        absent = (whole.num_layers - spec.num_layers) * layer_weights(whole) * ITEM_BYTES
        card.take_cap(task.cap_gib, absent_bytes=absent if task.cap_gib else 0)
    arm: Arm
    if task.arm in NATIVE_ARMS:
        arm = NativeArm(
            task.arm,
            random_native(spec, device=device, dtype=dtype),
            is_shifted=family_of(task.model).logit_shift,
            backend="inductor" if device.type == "cuda" else "eager",
        )
    else:
        layers = task.layers or None
        arm = ExecutorArm(task.arm, task.model, num_layers=layers, device=device, dtype=dtype)
    for length in WARM_UP_LENGTHS:
        arm.step(canvas_of(task, length))
    return arm


def canvas_of(task: Task, length: int) -> Canvas:
    return random_canvas(
        length,
        task.prompt_share,
        vocab=model_spec(task.model).vocab_size,
        mask_id=MODELS[task.model]["mask_token_id"],
        device=task.torch_device,
    )


def fits(arm: Arm, task: Task, length: int, reasons: dict[int, str]) -> bool:
    """Whether a whole step of the length runs; notes why if memory is short, and raises any other error."""
    free_cached_memory()
    try:
        arm.step(canvas_of(task, length))
        synchronize(task.torch_device)
    except Exception as error:
        reason = card.shortage(error)
        if reason is None:
            raise
        reasons[length] = reason
    free_cached_memory()
    return length not in reasons


def find_longest(task: Task) -> Answer:
    """L_max under the cap, from the guess `length`; of our arms, the longest planned canvas that runs."""
    arm = open_arm(task)
    reasons: dict[int, str] = {}
    found, limit = Search(fits=task.length), LIMIT
    if isinstance(arm, ExecutorArm):
        # Plans cost nothing, and a step of a million rows takes a minute.
        found = longest(lambda length: is_planned(arm, task, length, reasons), guess=task.length, limit=limit)
        limit = found.fits
        if not limit:
            return {"length": 0, "probes": found.probes, "reason": reasons[found.too_long or limit]}
    ran = longest(lambda length: fits(arm, task, length, reasons), guess=found.fits, limit=limit)
    return {
        "length": ran.fits,
        "probes": ran.probes,
        "reason": reasons.get(ran.too_long or found.too_long or -1, ""),
    }


def is_planned(arm: ExecutorArm, task: Task, length: int, reasons: dict[int, str]) -> bool:
    """Whether a canvas of the length has a plan; notes why if it has none."""
    try:
        arm.plan(canvas_of(task, length))
    except UserError as error:
        reasons[length] = error.message
    return length not in reasons


def time_steps(task: Task) -> Answer:
    """Median milliseconds of a step at each length; a length that does not fit has a reason in its place."""
    arm = open_arm(task)
    found: dict[str, Any] = {}
    for length in task.lengths:
        free_cached_memory()
        try:
            found[str(length)] = {"ms": step_ms(arm, task, length)}
        except Exception as error:
            reason = card.shortage(error)
            if reason is None:
                raise
            found[str(length)] = {"reason": reason}
    return {"lengths": found}


def step_ms(arm: Arm, task: Task, length: int) -> float:
    """Median milliseconds of a step, after two that are not timed and compile what the length needs."""
    canvas, device = canvas_of(task, length), task.torch_device
    for _ in range(2):
        first = _seconds(lambda: arm.step(canvas), device)
    steps = min(MAX_STEPS, max(MIN_STEPS, math.ceil(TIMED_SECONDS / first)))
    with no_compilation(arm):
        return 1e3 * statistics.median(_seconds(lambda: arm.step(canvas), device) for _ in range(steps))


def record_timeline(task: Task) -> Answer:
    """Bytes alive during one step at `length`, in time order, and the peak over the average."""
    arm, canvas = open_arm(task), canvas_of(task, task.length)
    arm.step(canvas)
    points = arm.timeline(canvas) if isinstance(arm, ExecutorArm) else _traced(lambda: arm.step(canvas), task)
    answer = {"points": fewer_points(points), "peak_over_average": peak_over_average(points)}
    if task.torch_device.type == "cuda":
        answer |= _memory(arm, canvas)
    return answer | (arm.planned(canvas) if isinstance(arm, ExecutorArm) else {})


def _memory(arm: Arm, canvas: Canvas) -> Answer:
    """Bytes of a step: live and reserved as torch counts them, physical as the driver does."""
    if isinstance(arm, ExecutorArm):
        arm.shrink()
    free_cached_memory()
    torch.cuda.synchronize()
    before, free = torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0]
    torch.cuda.reset_peak_memory_stats()
    arm.step(canvas)
    torch.cuda.synchronize()
    physical = free - torch.cuda.mem_get_info()[0]
    # torch sees one workspace of ours at most: the bytes that are alive in it are those of the plan.
    reserved = physical if isinstance(arm, ExecutorArm) else torch.cuda.max_memory_reserved() - before
    live = torch.cuda.max_memory_allocated() - before
    return {"live_bytes": live, "reserved_bytes": reserved, "physical_bytes": physical}


def _traced(call: Callable[[], Any], task: Task) -> list[tuple[float, float]]:
    if task.torch_device.type != "cuda":
        return []
    torch.cuda.synchronize()
    torch.cuda.memory._record_memory_history(enabled="all", context=None, max_entries=1_000_000)
    call()
    torch.cuda.synchronize()
    traces = torch.cuda.memory._snapshot()["device_traces"]
    torch.cuda.memory._record_memory_history(enabled=None)
    return timeline_of(traces[task.torch_device.index or 0])


def measure_rates(task: Task) -> Answer:
    """FLOP/s of the best library product, and of the best library attention at each length."""
    attention = {str(length): attention_rate(task, length) for length in task.lengths}
    return {"matmul": matmul_rate(device=task.device), "attention": attention}


def attention_rate(task: Task, length: int) -> float:
    """FLOP/s of the best back end of SDPA, 0 if none runs; keys are those of all heads."""
    spec, device = model_spec(task.model), task.torch_device
    shape = (1, spec.num_heads, length, spec.head_dim)
    q, k, v = (torch.randn(shape, device=device, dtype=getattr(torch, task.dtype)) for _ in range(3))
    backends = ATTENTION_BACKENDS if device.type == "cuda" else (SDPBackend.MATH,)
    flops, best = 4.0 * math.prod(shape) * length, 0.0
    for backend in backends:
        try:
            with sdpa_kernel([backend]), torch.inference_mode():
                seconds = [
                    _seconds(lambda: F.scaled_dot_product_attention(q, k, v), device)
                    for _ in range(2 + REPEATS)
                ]
            best = max(best, flops / statistics.median(seconds[2:]))
        except RuntimeError as error:
            print(f"{backend.name}: {error}".partition("\n")[0])
    return best


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _seconds(call: Callable[[], Any], device: torch.device) -> float:
    synchronize(device)
    start = time.perf_counter()
    call()
    synchronize(device)
    return time.perf_counter() - start


@contextmanager
def no_compilation(arm: Arm) -> Iterator[None]:
    """A compiled arm that would compile again raises: a compilation must not be timed."""
    if not (isinstance(arm, NativeArm) and arm.is_compiled):
        yield
        return
    with torch.compiler.set_stance("fail_on_recompile"):
        yield


KINDS: dict[str, Callable[[Task], Answer]] = {
    "l_max": find_longest,
    "step": time_steps,
    "timeline": record_timeline,
    "rates": measure_rates,
}

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
