"""The engine: requests in, completions out, one loop.

    engine = Engine.from_pretrained("outputs/tiny", decoder="isd", stride=4)
    [answer] = engine.generate(["Lea has 9 shells. ..."], SamplingParams(temperature=0))

One step is `scheduler.next` -> `worker.launch` (decoder.plan -> runner.forward -> decoder.advance) ->
`_collect`, which reads the results of steps that have finished. With tensor parallelism every rank has a
worker, and only rank 0 has an engine."""

from __future__ import annotations

import itertools
import math
import reprlib
import threading
from collections import deque
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from idlm.contracts import Completion, Exactness, SamplingParams, TokenLogprob
from idlm.devices import is_out_of_memory
from idlm.errors import UserError
from idlm.infer.build import build
from idlm.infer.interrupts import uninterrupted
from idlm.infer.parts import (
    MIN_CONSECUTIVE_OOM,
    EngineParts,
    Prompt,
    decoded_otherwise,
    grammar_failed,
    nonfinite_logits,
    out_of_memory,
)
from idlm.infer.request import ANONYMOUS, PassCounts, QueueOrder, Request, strip_stop_id
from idlm.infer.runtime.graphs.cuda_graphs import StaticStep
from idlm.infer.runtime.stride_controller import StepLoad, StrideController
from idlm.infer.runtime.worker import InflightStep, Worker
from idlm.infer.settings import EngineSettings, check_options
from idlm.infer.sparse.row_reservation import RowCounts, RowReservation
from idlm.infer.structured.grammar import Compiling
from idlm.text.detokenizer import AnswerText, answer_text


@dataclass(slots=True)
class StreamEvent:
    """New tokens and text of one sample; the last event of a sample carries its `completion`.

    `logprobs` holds one entry per token if requested. The first event has the `prompt_logprobs`
    of `Completion`, and each the `passes` that emitted its tokens, if requested. `error` is set if the answer
    is not complete: IDLM-0448, IDLM-0457 or IDLM-0473."""

    request_id: str
    index: int
    token_ids: tuple[int, ...]
    text: str
    completion: Completion | None
    error: UserError | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    passes: tuple[PassCounts, ...] = ()


class Engine:
    """Continuous batching over one model and one decoder. Threads may call `generate` and `stream` at once:
    they take turns in steps, which hold the requests of all. `step` is for one thread alone."""

    def __init__(self, parts: EngineParts, worker: Worker | None = None) -> None:
        self._parts, self._worker = parts, worker or Worker(parts)
        self.tokenizer, self.model, self.semantics = parts.tokenizer, parts.model, parts.model.semantics
        self.decoder, self.table, self.pool = parts.decoder, parts.table, parts.pool
        self.scheduler, self._stride_controller = parts.scheduler, parts.stride_controller
        # Only in passes of blocks and canvases the number of rows is known on the device alone.
        self._reservation: RowReservation | None = None
        if not (policy := parts.decoder.kv_policy).num_lookahead_tokens:
            self._reservation = RowReservation(drops=parts.drops_rows, block_size=policy.block_size)
        self._active: dict[str, list[Request]] = {}
        self._unread: dict[Request, None] = {}
        """Requests, in order, with tokens that no event has."""
        self._events: list[StreamEvent] = []
        """Events that were not taken yet, mostly the last ones of requests."""
        self._inflight: deque[InflightStep] = deque()
        self._last_scheduled: list[Request] = []
        self._num_consecutive_oom = 0
        self._num_added = 0
        self._lock = threading.RLock()

    @classmethod
    def from_pretrained(cls, path: str | Path, decoder: str | None = None, **options: Any) -> Engine:
        """Load a checkpoint directory. `decoder` None chooses the one that fits the checkpoint.

        `options` are the fields of `EngineSettings` (device, dtype, max_num_seqs, ...) and of the decoder's
        Config (for isd: stride, rejection_strategy, acceptance). `accelerators` may be a name, a list of
        names, or options by name: {"mage": {"k": 256}}. With `tensor_parallel=n` the engine starts n-1 more
        processes, which end with `close` or with this process. Raises UserError for any unusable option."""
        path = Path(path).expanduser()
        checked = check_options(decoder, options)
        if checked.settings.tensor_parallel == 1:
            return cls(build(path, checked))
        from idlm.infer.distributed.launcher import create_worker

        worker = create_worker(path, checked)
        return cls(worker.parts, worker)

    def close(self) -> None:
        """End the processes of tensor parallelism; the engine cannot be used afterwards."""
        self._worker.close()

    @property
    def settings(self) -> EngineSettings:
        """The settings of this engine, with defaults resolved."""
        return self._parts.settings

    @property
    def row_counts(self) -> RowCounts:
        """Rows that passes of blocks and canvases needed and computed so far."""
        return RowCounts() if self._reservation is None else self._reservation.counts

    def metrics(self) -> dict[str, float]:
        """Counters since the engine was loaded, and what its warm-up took."""
        step, warm_up = self._parts.step, self._parts.warm_up
        in_traffic = step.num_captured_in_traffic if isinstance(step, StaticStep) else 0
        return {
            "graphs_captured_ahead": warm_up.num_graphs,
            "graphs_captured_in_traffic": in_traffic,
            "warm_up_seconds": warm_up.seconds,
            "warm_up_bytes": warm_up.num_bytes,
            "preemptions": self.scheduler.num_preemptions,
        }

    def capture_missed(self) -> bool:
        """Between requests: capture one shape of pass that ran without a CUDA graph; False if there is
        none."""
        return not self.has_work and self._worker.capture_missed()

    def generate(
        self,
        prompts: Iterable[Prompt],
        params: SamplingParams | Iterable[SamplingParams] | None = None,
        *,
        request_ids: Iterable[str] | None = None,
    ) -> list[Completion]:
        """Answers in the order of the prompts; the `n` samples of a prompt are adjacent.

        Raises UserError IDLM-0407 if `prompts` is not a list (or another iterable) of texts and lists of
        token ids, and the error of the first request that fails (`StreamEvent.error`), and aborts the others.
        Use `add_request` and `step` to get their answers."""
        done: dict[tuple[str, int], Completion] = {}
        with self._queued(prompts, params, request_ids) as keys:
            own = {request_id for request_id, _ in keys}
            while len(done) < len(keys):
                for event in self._step_for(own):
                    if event.completion is not None:
                        done[event.request_id, event.index] = event.completion
        return [done[key] for key in keys]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Generator[StreamEvent]:
        """Events of one prompt as steps finish; closing the iterator aborts the request.

        Checks and queues the request before the first event is read. Raises UserError like `generate`."""
        events = self._events_of(prompt, params)
        # It queues the prompt; closing it aborts the request then, also before an event is read.
        next(events)
        return cast(Generator[StreamEvent], events)

    def _events_of(self, prompt: Prompt, params: SamplingParams | None) -> Generator[StreamEvent | None]:
        """Queue the prompt and yield None, then its events until all samples are done."""
        with self._queued([prompt], params, None, streams=True) as keys:
            yield None
            num_samples = len(keys)
            while num_samples:
                for event in self._step_for({keys[0][0]}):
                    num_samples -= event.completion is not None
                    yield event

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        streams: bool = False,
        turn: QueueOrder = ANONYMOUS,
        is_read: bool = True,
        has_passes: bool = False,
    ) -> None:
        """Queue a prompt (text or token ids). With `streams` every event has text, not only the last one.
        Requests of different clients and calls (`turn`) are admitted in turn. With `is_read` False each
        sample has one event, at its end. `has_passes`: events say what each pass emitted."""
        self._check_new(request_id)
        samples = self._parts.samples(request_id, prompt, params)
        with self._lock, uninterrupted():
            for request in samples:
                self._num_added += 1
                request.turn, request.is_read = turn, is_read
                request.passes = [] if has_passes else None
                self._active.setdefault(request_id, []).append(request)
                if (request.params.stop or streams) and self.tokenizer is not None:
                    request.answer = AnswerText.of(self.tokenizer, request.prompt_ids, request.params)
                self.scheduler.add(request)

    def encode(self, prompts: Sequence[str]) -> list[list[int]]:
        """Token ids of text prompts, as `add_request` encodes each. Raises the UserErrors that it raises."""
        return self._parts.encode(prompts)

    def begin_grammar(self, params: SamplingParams) -> Compiling | None:
        """Begin to compile the grammar of a request in a thread: `add_request` need not wait for it then."""
        return None if params.constraint is None else self._parts.grammars().begin(params.constraint)

    def may_add(self, grammar: Compiling | None) -> bool:
        """Whether a request with this grammar can run now: it is compiled, and no other one is on trial with
        it."""
        if grammar is None or not grammar.done():
            return grammar is None
        compiled, queued = grammar.result(), (*self.scheduler.running, *self.scheduler.waiting)
        if isinstance(compiled, UserError) or not compiled.cost.is_on_trial:
            return True
        return not any(request.grammar and request.grammar.cost.is_on_trial for request in queued)

    def check_request(
        self, request_id: str, prompt: Prompt, params: SamplingParams | None = None, *, compiles: bool = True
    ) -> None:
        """Raise the UserError that `add_request` would raise, but for an id in use. `compiles`: see
        `samples`."""
        self._parts.samples(request_id, prompt, params, compiles=compiles)

    def draft_counts(self, request_id: str) -> tuple[int, int]:
        """Accepted and tested drafts of a request's unfinished samples so far."""
        samples = self._active.get(request_id, ())
        return sum(sum(each.accepted) for each in samples), sum(sum(each.tested) for each in samples)

    @uninterrupted()
    def abort(self, request_id: str) -> list[Completion]:
        """Stop a request, queued or running; returns its samples so far, [] for an unknown id."""
        completions = []
        for request in list(self._active.get(request_id, ())):
            request.finish_reason = "abort"
            completions.append(self._finish(request))
        return completions

    @uninterrupted()
    def _drop(self, request_ids: Collection[str]) -> None:
        """Abort requests and discard their events."""
        with self._lock:
            for request_id in request_ids:
                self.abort(request_id)
            self._events = [event for event in self._events if event.request_id not in request_ids]

    @property
    def exactness(self) -> Exactness:
        """The class of its answers: "lossy" if they may follow another distribution than the checkpoint's, as
        with `tau` above 0 on any engine."""
        return "lossy" if self._parts.is_lossy else "exact"

    @property
    def is_running(self) -> bool:
        return bool(self._active)

    @property
    def has_work(self) -> bool:
        """Whether a request is unfinished or an event unread."""
        return bool(self._active or self._events)

    def step(self) -> list[StreamEvent]:
        """Launch one forward pass over the running requests; returns the events since the last call.

        The list may be empty: a step that only stores prompts emits nothing. Call until `has_work` is False.
        Ctrl-C and SIGTERM wait for the end of the step, a second one does not."""
        self._run_and_report(None)
        return self._taken(None)

    def take_events(self) -> list[StreamEvent]:
        """The events since the last call, without a step: those of `run_step`, or of a step that raised."""
        self._make_events(None)
        return self._taken(None)

    @uninterrupted()
    def _run_and_report(self, request_ids: Collection[str] | None) -> None:
        self.run_step()
        self._make_events(request_ids)

    @uninterrupted()
    def _make_events(self, request_ids: Collection[str] | None) -> None:
        """Make events of the tokens that these requests (None: all) emitted since their last ones. Text is
        made here, in batches, unless it may end the answer."""
        for request in [one for one in self._unread if request_ids is None or one.request_id in request_ids]:
            self._events.append(self._event(request))
            del self._unread[request]

    def _taken(self, request_ids: Collection[str] | None) -> list[StreamEvent]:
        """Take the events of these requests, None: of all; others stay for their own reader."""
        events = self._events
        if request_ids is None:
            self._events = []
            return events
        self._events = [event for event in events if event.request_id not in request_ids]
        return [event for event in events if event.request_id in request_ids]

    def _event(self, request: Request) -> StreamEvent:
        """The event of the tokens that none has yet."""
        start, new_ids = request.num_reported, self._report(request)
        answer, passes = request.answer, tuple(request.passes or ())
        if passes:
            request.passes = []
        return StreamEvent(
            request.request_id,
            request.index,
            tuple(new_ids),
            "" if answer is None else answer.take(),
            None,
            logprobs=tuple(request.logprobs[start:]),
            prompt_logprobs=None if start else request.all_prompt_logprobs(),
            passes=passes,
        )

    def _report(self, request: Request) -> list[int]:
        """The tokens that no event has yet, which become text."""
        new_ids = request.token_ids[request.num_reported :]
        request.num_reported = len(request.token_ids)
        if request.answer is not None and not request.answer.has_stops:
            request.answer.push(strip_stop_id(new_ids, request.stop_ids))
        return new_ids

    @uninterrupted()
    def run_step(self) -> None:
        """Launch a step and collect finished ones, whose events `take_events` returns. A step that raises has
        no effect: its requests are queued again. After an out-of-memory error the next steps are smaller."""
        oom_message = None
        try:
            is_launched = self._launch()
            self._collect(max_inflight=self._max_inflight() if is_launched else 0)
        except BaseException as error:
            self._inflight.clear()
            self.scheduler.requeue_all()
            if not is_out_of_memory(error):
                raise
            oom_message = str(error)
        # Outside of `except`, because the traceback holds the tensors of the step alive.
        if oom_message is not None:
            self._recover_from_oom(oom_message)
        elif is_launched:
            self._num_consecutive_oom = 0
            self.scheduler.restore_budget()

    def _max_inflight(self) -> int:
        """Steps under way when results are read. One before a step of queued kernels: CUDA holds 1,024
        launches, and a host that waits to add to them reads no results meanwhile."""
        maximum = self.settings.num_inflight_steps or 0
        return min(maximum, 1) if self._inflight[-1].is_queued else maximum

    def _launch(self) -> bool:
        """Launch the next step without waiting for its results; False if no request can run."""
        schedule = self.scheduler.next()
        if schedule is None:
            # Read all results first: preemption must not depend on which steps have finished.
            self._collect(max_inflight=0)
            schedule = self.scheduler.next()
        assert schedule is not None, f"{len(self._inflight)=}"
        if not schedule.requests:
            return False
        self._last_scheduled = schedule.requests
        if self._stride_controller is not None:
            schedule.mode = self._stride_controller.choose(StepLoad.of(schedule))
        if self._reservation is not None:
            self._reservation.choose(schedule)
        schedule.derive()
        self._inflight.append(InflightStep(schedule, self._worker))
        schedule.launched()
        return True

    def _collect(self, *, max_inflight: int) -> None:
        """Process finished steps, oldest first, and wait for more until `max_inflight` remain."""
        while self._inflight and (len(self._inflight) > max_inflight or self._inflight[0].is_ready()):
            step = self._inflight.popleft()
            counts = step.counts()
            if self._reservation is not None:
                self._reservation.observe(step.demands(), step.widths)
            if step.schedule.prompt_rows is not None:
                for request, position, logprobs in step.prompt_logprobs():
                    request.add_prompt_logprobs(position, logprobs)
            if self._stride_controller is not None and not step.schedule.is_eager:
                load = StepLoad.of(step.schedule, has_drafts=False)
                self._stride_controller.observe_time(step.mode, load, step.seconds())
            scored: Sequence[Sequence[TokenLogprob]] = [()] * len(step.requests)
            if step.schedule.members.num_top is not None:
                scored = step.logprobs()
            self._process(step, counts, scored)

    def _process(
        self, step: InflightStep, counts: list[list[int]], scored: Sequence[Sequence[TokenLogprob]]
    ) -> None:
        """Commit what a step emitted for its requests (`InflightStep.counts`); finish those that are done."""
        controller = self._stride_controller
        columns = (step.requests, step.samples, *counts[:2], *counts[5:], step.token_ids, scored)
        for request, samples, nonfinite, waited, num_emitted, accepted, tested, new_ids, logprobs in zip(
            *columns, strict=True
        ):
            # Skip requests that finished or were aborted after this step was launched.
            if request.finish_reason is not None:
                continue
            request.num_forwards += 1
            if not samples:
                continue
            del new_ids[num_emitted:]
            num_known = request.num_known + num_emitted
            is_plain = request.is_plain and num_emitted and not nonfinite and num_known < request.max_length
            if is_plain and request.stop_ids.isdisjoint(new_ids):
                request.token_ids += new_ids
                # All but the last one are stored.
                request.num_known, request.num_computed = num_known, num_known - 1
                request.num_inflight -= 1
            elif self._fails(request, new_ids, nonfinite):
                continue
            else:
                num_before = request.num_known
                new_ids = self._extend(request, new_ids)
                self.scheduler.book(request, num_before, waited)
            if new_ids:
                request.num_steps += 1
                if tested or request.passes is not None:
                    request.count_drafts(accepted, tested, len(new_ids))
                if controller is not None:
                    self._observe_drafts(controller, request, accepted, tested, step.mode)
                if logprobs:
                    request.logprobs += logprobs[: len(new_ids)]
                if request.is_read:
                    self._unread[request] = None
            if request.finish_reason is not None:
                self._end(request)
            elif request.grammar is not None and request.grammar.problem is not None:
                problem = grammar_failed(request.request_id, len(request.token_ids), request.grammar.problem)
                self._fail(request, problem)
            elif nonfinite and new_ids:
                self._fail_nonfinite(request)

    def _observe_drafts(
        self, controller: StrideController, request: Request, accepted: int, tested: int, mode: int
    ) -> None:
        """Count drafts for the stride controller, those of late by request."""
        request.remember_drafts(accepted, tested)
        # Drafts that a grammar forces are always accepted.
        if request.grammar is None:
            from_masks = not request.has_other_drafts
            controller.observe_drafts(accepted, tested, from_masks=from_masks)
            drafts_again = accepted < tested and self.decoder.drafts_again(mode)
            request.has_other_drafts = from_masks and drafts_again

    def _fails(self, request: Request, token_ids: list[int], nonfinite: int) -> bool:
        """Fail a request whose emission means nothing, or contradicts what it has emitted before."""
        scored = () if request.token_ids else request.prompt_logprobs
        if nonfinite == 1 or any(math.isnan(one.logprob) for one in scored):
            self._fail_nonfinite(request)
        elif request.contradicts(token_ids):
            again = decoded_otherwise(request.request_id, len(request.token_ids))
            self._fail(request, again, invalidate=True)
        return request.finish_reason is not None

    def _end(self, request: Request) -> None:
        event = self._event(request)
        if request.answer is not None:
            event.text += request.answer.finish()
        event.completion = self._finish(request)
        self._events.append(event)

    def _extend(self, request: Request, token_ids: list[int]) -> list[int]:
        """`Request.extend`; with stop strings token by token, up to the one that brings a stop string."""
        new_ids, grammar, answer = list[int](), request.grammar, request.answer
        if answer is None or not answer.has_stops:
            return request.extend(token_ids)
        for token_id in token_ids:
            added = request.extend([token_id])
            new_ids += added
            answer.push(strip_stop_id(added, request.stop_ids))
            if answer.is_stopped:
                request.finish_reason = "stop"
            if request.finish_reason is not None or (grammar is not None and grammar.problem):
                break
        return new_ids

    def _finish(
        self, request: Request, error: UserError | None = None, *, invalidate: bool = False
    ) -> Completion:
        """Free what the request holds and return its completion. `invalidate`: see `Scheduler.retire`."""
        self.scheduler.retire(request, invalidate=invalidate)
        samples = self._active[request.request_id]
        samples.remove(request)
        if not samples:
            del self._active[request.request_id]
        self._report(request)
        self._unread.pop(request, None)
        if request.answer is not None:
            request.answer.finish()
            text = request.answer.text
        else:
            shown_ids = strip_stop_id(request.token_ids, request.stop_ids)
            text = "" if self.tokenizer is None else answer_text(self.tokenizer, shown_ids)
        return request.complete(text, "lossy" if request.params.tau > 0 else self.exactness, error=error)

    def _step_for(self, request_ids: set[str]) -> list[StreamEvent]:
        """Run a step and take the events of these requests; raises the error of one that failed."""
        with self._lock:
            self._run_and_report(request_ids)
            own = self._taken(request_ids)
        error = next((event.error for event in own if event.error is not None), None)
        if error is not None:
            raise error
        return own

    def _recover_from_oom(self, message: str) -> None:
        """Make the next step smaller; after `MIN_CONSECUTIVE_OOM` failures, fail the youngest request."""
        self._num_consecutive_oom += 1
        self.scheduler.halve_budget()
        if self._stride_controller is not None:
            self._stride_controller.observe_out_of_memory()
        self._worker.free_cached_memory()
        youngest = next((one for one in reversed(self._last_scheduled) if one.finish_reason is None), None)
        if self._num_consecutive_oom < MIN_CONSECUTIVE_OOM or youngest is None:
            return
        budget = self.settings.row_budget
        error = out_of_memory(
            youngest.request_id, self._num_consecutive_oom, message, max_num_batched_tokens=budget
        )
        self._fail(youngest, error)

    def _fail_nonfinite(self, request: Request) -> None:
        """Fail a request whose logits are not finite; no other request may reuse its KV."""
        num_tokens, dtype = len(request.token_ids), self._parts.model.dtype
        self._fail(request, nonfinite_logits(request.request_id, num_tokens, dtype=dtype), invalidate=True)

    def _fail(self, request: Request, error: UserError, *, invalidate: bool = False) -> None:
        """Finish a request with the tokens it has. `invalidate`: see `Scheduler.retire`."""
        request.finish_reason = "error"
        if request in self._unread:
            self._events.append(self._event(request))
        text = "" if request.answer is None else request.answer.finish()
        completion = self._finish(request, error, invalidate=invalidate)
        self._events.append(StreamEvent(request.request_id, request.index, (), text, completion, error))

    @contextmanager
    def _queued(
        self,
        prompts: Iterable[Prompt],
        params: SamplingParams | Iterable[SamplingParams] | None,
        request_ids: Iterable[str] | None,
        *,
        streams: bool = False,
    ) -> Iterator[list[tuple[str, int]]]:
        """Queue all prompts, or none if one is refused; gives (request id, index) of every sample. Aborts
        what is unfinished at its end."""
        if isinstance(prompts, str | bytes | Mapping | Set) or not isinstance(prompts, Iterable):
            raise UserError(
                "IDLM-0407",
                f"prompts={reprlib.repr(prompts)} is not a list of prompts",
                fix="give a list, each prompt a text or a list of token ids: generate([prompt], ...)",
            )
        prompts = list(prompts)
        settings: list[Any] = [SamplingParams() if params is None else params] * len(prompts)
        if isinstance(params, Iterable) and not isinstance(params, Mapping):
            settings = list(params)
        given = None if request_ids is None else list(request_ids)
        num_ids = len(prompts) if given is None else len(given)
        if not len(prompts) == len(settings) == num_ids:
            raise UserError(
                "IDLM-0408",
                f"{len(prompts)} prompts, {len(settings)} params and {num_ids} request ids do not match",
                fix="give one SamplingParams for all or one per prompt, and one id per prompt or none",
            )
        added: set[str] = set()
        try:
            with self._lock:
                ids = given or self._unused_ids(len(prompts))
                for request_id, prompt, setting in zip(ids, prompts, settings, strict=True):
                    self._check_new(request_id)
                    added.add(request_id)
                    self.add_request(request_id, prompt, setting, streams=streams, is_read=streams)
            yield [(name, k) for name, setting in zip(ids, settings, strict=True) for k in range(setting.n)]
        finally:
            self._drop(added)

    def _unused_ids(self, count: int) -> list[str]:
        in_use = {*self._active, *(event.request_id for event in self._events)}
        names = (f"r{number}" for number in itertools.count(self._num_added))
        return list(itertools.islice((name for name in names if name not in in_use), count))

    def _check_new(self, request_id: str) -> None:
        if not isinstance(request_id, str):
            raise UserError("IDLM-0409", f"request id {request_id!r} is not a string", fix="give a string")
        has_unread = any(event.request_id == request_id for event in self._events)
        if request_id in self._active or has_unread:
            state = "has events that step() has not returned yet" if has_unread else "is in use"
            raise UserError(
                "IDLM-0409", f"request id {request_id!r} {state}", fix="give every request its own id"
            )
