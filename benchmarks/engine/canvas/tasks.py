"""What one process measures: a task names an arm, its shapes and its cap; the answer is plain JSON.

Every task runs in a process of its own (`child.py`), after a ballast that leaves its cap of the card.
Shapes: L places, N heads, H head dim.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.engine.canvas import card
from benchmarks.engine.canvas.card import Search, fewer_points, longest, peak_over_average, timeline_of
from benchmarks.engine.canvas.executor import PRODUCT_ARMS, ExecutorArm
from benchmarks.engine.canvas.models import (
    CONFIGS,
    ITEM_BYTES,
    is_shifted,
    layer_weights,
    model_spec,
)
from benchmarks.engine.canvas.native import NATIVE_ARMS, Canvas, NativeArm, random_canvas, random_model
from benchmarks.stream import matmul_rate
from idlm.errors import UserError

ARMS = (*NATIVE_ARMS, *PRODUCT_ARMS)
WARM_UP_LENGTHS = (512, 768)
"""Two lengths, so that a compiler sees that the length varies before anything is measured."""
TIMED_SECONDS, MIN_STEPS, MAX_STEPS = 1.5, 3, 20
ATTENTION_BACKENDS = (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION)
REPEATS = 5


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
    limit: int = 1 << 22
    device: str = "cuda"
    dtype: str = "bfloat16"


class Arm(Protocol):
    """One way to compute a denoising step."""

    def step(self, canvas: Canvas) -> Tensor:
        """Return the ids after a step."""
        ...


Answer = dict[str, Any]


def run_task(task: Task) -> Answer:
    """The answer of a task; raises what the arm raises."""
    return KINDS[task.kind](task)


def open_arm(task: Task) -> Arm:
    """The arm of a task on its device, after the ballast."""
    assert task.arm in ARMS, f"{task.arm=}"
    device, dtype = torch.device(task.device), getattr(torch, task.dtype)
    whole = model_spec(task.model)
    spec = replace(whole, num_layers=task.layers or whole.num_layers)
    if device.type == "cuda":
        absent = (whole.num_layers - spec.num_layers) * layer_weights(whole) * ITEM_BYTES
        card.take_cap(task.cap_gib, absent_bytes=absent if task.cap_gib else 0)
    if task.arm in NATIVE_ARMS:
        model = random_model(spec, device=device, dtype=dtype)
        return NativeArm(
            task.arm,
            model,
            is_shifted=is_shifted(task.model),
            backend="inductor" if device.type == "cuda" else "eager",
        )
    return ExecutorArm(task.arm, task.model, spec, device=device, dtype=dtype)


def canvas_of(task: Task, length: int) -> Canvas:
    """A random canvas of the task's model and prompt share."""
    return random_canvas(
        length,
        task.prompt_share,
        vocab=model_spec(task.model).vocab_size,
        mask_id=CONFIGS[task.model]["mask_token_id"],
        device=torch.device(task.device),
    )


def warm_up(arm: Arm, task: Task) -> None:
    """Run both lengths of the warm-up, which loads and compiles what a step needs."""
    for length in WARM_UP_LENGTHS:
        arm.step(canvas_of(task, length))


def fits(arm: Arm, task: Task, length: int, reasons: dict[int, str]) -> bool:
    """Whether a whole step of the length runs; notes why if memory is short, and raises any other error."""
    device = torch.device(task.device)
    card.release(device)
    try:
        arm.step(canvas_of(task, length))
        synchronize(device)
    except Exception as error:
        reason = card.shortage(error)
        if reason is None:
            raise
        reasons[length] = reason
    card.release(device)
    return length not in reasons


def find_longest(task: Task) -> Answer:
    """L_max under the cap, from the guess `length`; of our arms, the longest planned canvas that runs."""
    arm = open_arm(task)
    warm_up(arm, task)
    reasons: dict[int, str] = {}
    found, limit = Search(fits=task.length), task.limit
    if isinstance(arm, ExecutorArm):
        # Plans cost nothing, and a step of a million rows takes a minute.
        found = longest(lambda length: is_planned(arm, task, length, reasons), guess=task.length, limit=limit)
        limit = found.fits
        if not limit:
            return {"length": 0, "probes": found.probes, "reason": reasons[found.too_long or limit]}
    ran = longest(lambda length: fits(arm, task, length, reasons), guess=found.fits, limit=limit)
    reason = reasons.get(ran.too_long or found.too_long or -1, "")
    return {"length": ran.fits, "probes": ran.probes, "reason": reason, **_compilations(arm)}


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
    warm_up(arm, task)
    found: dict[str, Any] = {}
    for length in task.lengths:
        card.release(torch.device(task.device))
        try:
            found[str(length)] = {"ms": step_ms(arm, task, length)}
        except Exception as error:
            reason = card.shortage(error)
            if reason is None:
                raise
            found[str(length)] = {"reason": reason}
    return {"lengths": found, **_compilations(arm)}


def step_ms(arm: Arm, task: Task, length: int) -> float:
    """Median milliseconds of a step, after two that are not timed and compile what the length needs."""
    canvas, device = canvas_of(task, length), torch.device(task.device)
    for _ in range(2):
        first = _seconds(lambda: arm.step(canvas), device)
    steps = min(MAX_STEPS, max(MIN_STEPS, math.ceil(TIMED_SECONDS / first)))
    with no_compilation(arm):
        return 1e3 * statistics.median(_seconds(lambda: arm.step(canvas), device) for _ in range(steps))


def _memory(arm: Arm, task: Task, length: int) -> Answer:
    device, canvas = torch.device(task.device), canvas_of(task, length)
    if isinstance(arm, ExecutorArm):
        arm.shrink()
    card.release(device)
    before, free = card.device_counts(device), card.free_bytes(device)
    card.reset_counts(device)
    arm.step(canvas)
    physical = free - card.free_bytes(device)
    after = card.device_counts(device)
    answer = {
        "live_bytes": after["max_allocated"] - before["allocated"],
        "reserved_bytes": after["max_reserved"] - before["allocated"],
        "physical_bytes": physical,
    }
    if isinstance(arm, ExecutorArm):
        # torch sees one workspace at most: the bytes that are alive in it are those of the plan.
        answer |= arm.planned(canvas) | {"reserved_bytes": physical}
    return answer


def record_timeline(task: Task) -> Answer:
    """Bytes alive during one step at `length`, in time order, and the peak over the average."""
    arm, device = open_arm(task), torch.device(task.device)
    warm_up(arm, task)
    canvas = canvas_of(task, task.length)
    arm.step(canvas)
    if isinstance(arm, ExecutorArm):
        points, end = arm.timeline(canvas), None
    else:
        points, end = _traced(lambda: arm.step(canvas), device), None
    memory = _memory(arm, task, task.length)
    return {"points": fewer_points(points), "peak_over_average": peak_over_average(points, end=end), **memory}


def _traced(call: Callable[[], Any], device: torch.device) -> list[tuple[float, float]]:
    """The timeline of one call; launches are blocking here (`child.py`), so host times are device times."""
    if device.type != "cuda":
        return []
    torch.cuda.synchronize(device)
    torch.cuda.memory._record_memory_history(enabled="all", context=None, max_entries=1_000_000)
    call()
    torch.cuda.synchronize(device)
    traces = torch.cuda.memory._snapshot()["device_traces"]
    torch.cuda.memory._record_memory_history(enabled=None)
    return timeline_of(traces[device.index or 0])


def measure_rates(task: Task) -> Answer:
    """FLOP/s of the best library product, and of the best library attention at each length."""
    attention = {str(length): attention_rate(task, length) for length in task.lengths}
    return {"matmul": matmul_rate(device=task.device), "attention": attention}


def attention_rate(task: Task, length: int) -> Answer:
    """FLOP/s of SDPA by back end, best first, at the model's heads; keys are expanded to all heads."""
    spec, device = model_spec(task.model), torch.device(task.device)
    shape = (1, spec.num_heads, length, spec.head_dim)
    q, k, v = (torch.randn(shape, device=device, dtype=getattr(torch, task.dtype)) for _ in range(3))
    backends = ATTENTION_BACKENDS if device.type == "cuda" else (SDPBackend.MATH,)
    flops, rates, reasons = 4.0 * math.prod(shape) * length, {}, {}
    for backend in backends:
        try:
            with sdpa_kernel([backend]), torch.inference_mode():
                seconds = [
                    _seconds(lambda: F.scaled_dot_product_attention(q, k, v), device)
                    for _ in range(2 + REPEATS)
                ]
            rates[backend.name] = flops / statistics.median(seconds[2:])
        except RuntimeError as error:
            reasons[backend.name] = str(error).partition("\n")[0]
    return {"rate": max(rates.values(), default=0.0), "backends": rates, "reasons": reasons}


def synchronize(device: torch.device) -> None:
    """Wait for all work of a device."""
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


def _compilations(arm: Arm) -> Answer:
    return {"compilations": arm.num_compilations()} if isinstance(arm, NativeArm) else {}


KINDS: dict[str, Callable[[Task], Answer]] = {
    "l_max": find_longest,
    "step": time_steps,
    "timeline": record_timeline,
    "rates": measure_rates,
}
