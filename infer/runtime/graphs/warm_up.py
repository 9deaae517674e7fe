"""Captures the graphs that traffic will need before the first request, and measures step times meanwhile.

Passes that only decode get a graph for every mode and, in steps of an eighth, every number of sequences;
passes that also store a few prompt rows for every power of two of sequences. Passes of more rows than
`eager_rows` need none: the host launches their kernels while the device computes the passes before. All
kernels are compiled first, on all cores of the host: passes over tensors without memory (on the meta device)
launch nothing but show which variants are needed, and Triton caches them on disk."""

from __future__ import annotations

import copy
import functools
import itertools
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from idlm import __version__
from idlm.devices import is_out_of_memory
from idlm.infer.decoders.base import rows_by_mode
from idlm.infer.models.base import ALONE, Shards
from idlm.infer.models.loader import LoadedModel, make_trunk, slot_share
from idlm.infer.parts import EngineParts, WarmUp
from idlm.infer.runtime.graphs.cuda_graphs import MAX_CUDA_GRAPHS, StaticStep
from idlm.infer.runtime.graphs.pass_costs import Captured
from idlm.infer.runtime.graphs.pass_shape import PassShape, slots_bucket
from idlm.infer.runtime.graphs.warm_up_shapes import WarmUpShapes, measured_shapes
from idlm.infer.runtime.stride_controller import StepTimes, cache_file, read_times, write_times
from idlm.kernels.backend import memory_bytes, only_compiled
from idlm.log import get_logger

AUTO_SECONDS = 20.0
"""Seconds of captures with warmup=auto; after `full`, none is missing."""
LAUNCH_SECONDS = 4e-4
"""Host time of a layer that is launched kernel by kernel, before it is measured: about 20 launches."""
TIMED_LAUNCHES = 3
FLOPS = 8e14
"""Of matrix products with hundreds of rows, on an H200: 768 rows of Qwen3-8B take 13.9 ms."""
MIN_EAGER_ROWS = 512
TIMED_SETTINGS = ("weights", "kv_cache", "attention", "deterministic", "tensor_parallel", "accelerators")


def eager_rows(model: LoadedModel, launch_seconds: float | None = None) -> int:
    """Rows of a pass that computes as long as the host takes to launch its kernels one by one, which is
    `launch_seconds` (None: not measured)."""
    num_parameters = sum(weight.numel() for weight in model.trunk.parameters())
    if launch_seconds is None:
        launch_seconds = model.spec.num_layers * LAUNCH_SECONDS
    return max(MIN_EAGER_ROWS, int(launch_seconds * FLOPS / (2 * num_parameters)))


def warm_up(
    parts: EngineParts, *, shards: Shards = ALONE, assemble: Callable[..., EngineParts] | None = None
) -> WarmUp:
    """Capture in advance what `parts` may need, as set by `warmup`, and give the stride
    controller the times of passes; logs what was done. `assemble`: that of `infer/build.py`, to compile
    kernels first. Ranks that share a model (`shards`) capture the same graphs: they agree on when to stop and
    on `eager_rows`, and use no recorded times, which not all may have."""
    step, settings, device = parts.step, parts.settings, parts.table.device
    if not settings.warms_up or not isinstance(step, StaticStep) or not step.captures:
        return WarmUp()
    start_time, free = time.monotonic(), memory_bytes(device)[0]
    # The last rank may have fewer rows of the head.
    step.eager_rows = shards.minimum(step.eager_rows)
    path = cache_file(timing_key(parts)) if _needs_times(parts) and shards.size == 1 else None
    known = read_times(path) if path is not None else {}
    plan = WarmUpShapes(
        decoder=parts.decoder,
        max_sequences=settings.max_sequences,
        max_length=parts.table.max_length,
        max_prompt_rows=settings.row_budget,
    )
    work = _Work(parts=parts, step=step, plan=plan, shards=shards, min_memory=free // 2, times=dict(known))
    if assemble is not None and is_plain(parts):
        work.compile(assemble)
    try:
        work.capture()
    except RuntimeError as error:
        if not is_out_of_memory(error) or shards.size > 1:
            raise
        get_logger(__name__).warning("warm-up: no memory for more graphs: %s", error)
    step.is_warm = len(work.captured) > 0
    work.tell_costs()
    if device.type == "cuda":
        # What the stream of first passes has freed.
        torch.cuda.empty_cache()
    if work.times:
        set_step_times(parts, work.times)
    if path is not None and work.times != known and work.times.keys() >= work.timed.keys():
        write_times(path, work.times)
    done = WarmUp(
        num_graphs=len(work.captured),
        num_wanted=min(len(work.shapes), MAX_CUDA_GRAPHS),
        num_bytes=max(0, free - memory_bytes(device)[0]),
        seconds=time.monotonic() - start_time,
    )
    get_logger(__name__).info(
        "warm-up: %d of %d CUDA graphs in %.1f s and %.2f GB; passes of more than %d rows are eager",
        *(done.num_graphs, done.num_wanted, done.seconds, done.num_bytes / 1e9, step.eager_rows),
    )
    return done


@dataclass(slots=True, kw_only=True)
class _Work:
    """A warm-up in progress: the `shapes` to capture and those that are `captured` or `timed`, with `times`
    by the same keys, and `row_seconds` of passes by their rows."""

    parts: EngineParts
    step: StaticStep
    plan: WarmUpShapes
    shards: Shards
    min_memory: int
    times: dict[tuple[int, int], float]
    shapes: list[PassShape] = field(default_factory=list)
    timed: dict[tuple[int, int], PassShape] = field(default_factory=dict)
    row_seconds: dict[int, float] = field(default_factory=dict)
    launch_seconds: float = 0.0
    captured: list[PassShape] = field(default_factory=list)
    end_time: float = math.inf

    def compile(self, assemble: Callable[..., EngineParts]) -> None:
        """Compile all kernels; every one is needed, so that this has no limit of time."""
        start_time = time.monotonic()
        needed = [*self.plan.prompts(self.step.eager_rows), *self.plan.compiled()]
        logger = get_logger(__name__)
        try:
            with only_compiled():
                num_compiled = compile_shapes(step_on_meta(self.parts, assemble), needed)
        except Exception as error:
            # A plug-in may read tensors, and the server was ready to start without this.
            logger.warning("warm-up: kernels are compiled by the passes that launch them: %s", error)
            return
        taken = time.monotonic() - start_time
        logger.info("warm-up: %d kernels compiled or loaded in %.1f s", num_compiled, taken)

    def capture(self) -> None:
        """Run passes that stay eager, then capture graphs, and time some of both."""
        parts, step, prompts = self.parts, self.step, self.plan.prompts(self.step.eager_rows)
        is_cuda = parts.table.device.type == "cuda"
        self.launch_seconds = parts.model.spec.num_layers * LAUNCH_SECONDS
        if parts.settings.warmup == "auto":
            self.end_time = time.monotonic() + AUTO_SECONDS
        for shape in prompts:
            if self._may_continue():
                step.run(shape)
        if prompts and is_cuda:
            self.launch_seconds = _launch_seconds(step, prompts[-1])
            step.eager_rows = self.shards.minimum(eager_rows(parts.model, self.launch_seconds))
        drops_rows, plan = parts.drops_rows, self.plan
        self.shapes = plan.with_capacity() if drops_rows else plan.captured(step.eager_rows)
        self.timed = self.plan.timed() if _needs_times(parts) else {}
        for key, shape in self.timed.items():
            if shape.all_rows > step.eager_rows and key not in self.times and self._may_continue():
                self.times[key] = step.seconds(shape)
        if is_cuda:
            torch.cuda.empty_cache()
        # Else a pass does not take what its rows take: padding reaches no expert, and may be dropped.
        counts_rows = parts.decoder.kv_policy.kind == "append" and parts.model.local.moe is None
        measured = measured_shapes(self.shapes) if counts_rows else []
        for shape in itertools.islice(self._ordered(), MAX_CUDA_GRAPHS):
            if not self._may_continue():
                return
            step.capture(shape, frees_memory=False)
            self.captured.append(shape)
            key = shape.mode, shape.num_sequences
            is_timed = self.timed.get(key) == shape
            if is_timed and key not in self.times:
                self.times[key] = step.seconds(shape)
            if shape in measured:
                seconds = self.times[key] if is_timed else step.seconds(shape)
                self.row_seconds[shape.all_rows] = seconds

    def tell_costs(self) -> None:
        """Pass the times of passes with prompts to the scheduler and the stride controller."""
        scheduler, controller = self.parts.scheduler, self.parts.stride_controller
        if scheduler.costs is None or self.parts.decoder.kv_policy.kind != "append":
            return
        if controller is not None:
            longest = slots_bucket(self.parts.table.max_length)
            plain = [shape for shape in self.shapes if shape.decides and not shape.filters]
            usual = [shape for shape in plain if shape.max_known == longest]
            missing = set(usual) - set(self.captured)
            controller.captured = Captured.of(usual, missing, self.step.eager_rows)
        graph_rows = {shape.num_prompt_rows for shape in self.captured if shape.num_prompt_rows}
        costs = replace(scheduler.costs, graph_rows=tuple(sorted(graph_rows)))
        scheduler.costs = costs.measured(self.row_seconds, self.launch_seconds)

    def _ordered(self) -> Iterator[PassShape]:
        """The shapes to capture: those that are timed, then those of the modes that these times favour."""
        timed = set(self.timed.values())
        yield from (shape for shape in self.shapes if shape in timed)
        others = [shape for shape in self.shapes if shape not in timed]
        controller = self.parts.stride_controller
        if controller is not None and self.times and self.shards.size == 1:
            set_step_times(self.parts, self.times)
            likely = functools.cache(controller.likely_modes)
            others.sort(key=lambda shape: shape.mode not in likely(shape.num_sequences))
        yield from others

    def _may_continue(self) -> bool:
        has_memory = memory_bytes(self.parts.table.device)[0] >= self.min_memory
        return bool(self.shards.minimum(int(has_memory and time.monotonic() <= self.end_time)))


def _needs_times(parts: EngineParts) -> bool:
    """Whether times of passes without sequences help: padding reaches no expert."""
    return parts.stride_controller is not None and parts.model.local.moe is None


def _launch_seconds(step: StaticStep, shape: PassShape) -> float:
    """Host time of launching a pass kernel by kernel, its kernels being compiled."""
    found = []
    for _ in range(TIMED_LAUNCHES):
        torch.cuda.synchronize()
        start_time = time.perf_counter()
        step.run(shape)
        found.append(time.perf_counter() - start_time)
    return min(found)


def set_step_times(parts: EngineParts, times: Mapping[tuple[int, int], float]) -> None:
    """Give the stride controller the times. The shortest pass reads all weights; KV is read as fast."""
    controller, model = parts.stride_controller, parts.model
    assert controller is not None
    itemsize = 1 if parts.settings.kv_cache == "fp8" else model.dtype.itemsize
    controller.times = StepTimes(
        measured=times,
        widths=rows_by_mode(parts.decoder, parts.table.max_length),
        seconds_per_slot=slot_share(model, itemsize) * min(times.values()),
    )


def timing_key(parts: EngineParts) -> dict[str, Any]:
    """What the times of passes depend on."""
    model, settings, device = parts.model, parts.settings, parts.table.device
    return {
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "versions": [__version__, torch.__version__],
        "model": asdict(model.local),
        "dtype": str(model.dtype),
        "options": {name: getattr(settings, name) for name in TIMED_SETTINGS},
        "modes": [asdict(mode) for mode in parts.decoder.modes],
        "adapters": getattr(model.trunk, "num_adapters", 0),
    }


MAX_THREADS = 16


def is_plain(parts: EngineParts) -> bool:
    """Whether `step_on_meta` launches all that the engine's passes launch."""
    model, settings = parts.model, parts.settings
    is_dense = model.spec.moe is None and not settings.is_lossy and not model.trunk.num_adapters
    appends = parts.decoder.kv_policy.kind == "append" and parts.stack is None
    return is_dense and appends and model.device.type == "cuda"


def step_on_meta(parts: EngineParts, assemble: Callable[..., EngineParts]) -> StaticStep:
    """The step of an engine like `parts` of two layers on the meta device, whose kernels are the same
    variants: the last layer has fewer rows than the others."""
    model, device = parts.model, torch.device("meta")
    spec = replace(model.local, num_layers=min(2, model.local.num_layers))
    trunk = make_trunk(spec, device=device, dtype=model.dtype)
    model = replace(model, trunk=trunk, spec=spec, local=spec, device=device)
    settings = replace(parts.settings, attention="triton", num_pages=parts.pool.num_pages)
    # The copy allocates its own state; a decoder made anew would repeat its warnings.
    decoder = copy.copy(parts.decoder)
    if decoder.selector is not None:
        decoder.selector = decoder.selector.moved(trunk)
    step = assemble(settings, model, None, decoder, ()).step
    assert isinstance(step, StaticStep), f"{type(step)=}"
    return step


def compile_shapes(step: StaticStep, shapes: Iterable[PassShape]) -> int:
    """Compile for the current GPU, or load from Triton's cache, what passes of these shapes launch; returns
    the number of new variants. `step` is on the meta device, made where kernels are `only_compiled`."""
    from triton import AsyncCompileMode
    from triton.runtime.jit import JITFunction

    launch, kernels = JITFunction.run, set()

    def compile_only(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernels.add(self)
        return launch(self, *arguments, grid=grid, warmup=True, **options)

    num_threads = min(MAX_THREADS, len(os.sched_getaffinity(0)))
    # Not raised here: Triton would then stay in this mode, without threads.
    with ThreadPoolExecutor(num_threads) as pool, AsyncCompileMode(pool, ignore_errors=True) as compiling:
        futures = compiling.raw_futures  # Triton makes a new list when the mode ends.
        JITFunction.run = compile_only
        try:
            for shape in shapes:
                step.run(shape)
        finally:
            JITFunction.run = launch
    if any(future.exception() for future in futures):
        # A launch shall compile again what failed, perhaps for lack of memory, and raise the error.
        for kernel in kernels:
            kernel.device_caches.clear()
    return len(futures)
