"""The engine: requests in, completions out, one loop.

    engine = Engine.from_pretrained("outputs/tiny", decoder="isd", stride=4)
    [answer] = engine.generate(["Lea has 9 shells. ..."], SamplingParams(temperature=0))

Data flows one way: scheduler.next -> worker.launch (decoder.plan -> runner.forward -> decoder.advance) ->
flight. With tensor parallelism all ranks have a worker, and rank 0 alone has an engine.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from idlm.contracts import Completion, SamplingParams
from idlm.errors import UserError
from idlm.files.paths import given_path
from idlm.infer.admission import Admission, Prompt, check_list, check_one
from idlm.infer.build import EngineParts
from idlm.infer.distributed.launcher import create_worker
from idlm.infer.errors import MIN_CONSECUTIVE_OOM, given_up, is_out_of_memory, not_finite
from idlm.infer.request import Request, fresh_ids, strip_stop_id
from idlm.infer.runtime.inflight import Emission, InflightStep
from idlm.infer.runtime.worker import Worker
from idlm.infer.settings import EngineSettings
from idlm.infer.stop_strings import AnswerText


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamEvent:
    """News of one sample after a pass: newly committed tokens, newly readable text, and at the end the
    completion; `error` where that is not the whole answer (IDLM-0448: memory was short, IDLM-0457: logits
    were not finite).
    """

    request_id: str
    index: int
    token_ids: tuple[int, ...]
    text: str
    completion: Completion | None
    error: UserError | None = None


class Engine:
    """Continuous batching over one model and one decoder. Not thread-safe."""

    def __init__(self, parts: EngineParts, worker: Worker | None = None) -> None:
        self._parts, self._worker = parts, worker or Worker(parts)
        self.tokenizer = parts.tokenizer
        self.semantics = parts.model.semantics
        self.decoder, self.table, self.pool = parts.decoder, parts.table, parts.pool
        self.scheduler, self._step, self._stride_controller = (
            parts.scheduler,
            parts.step,
            parts.stride_controller,
        )
        self._admission = Admission(parts)
        self._active: dict[str, list[Request]] = {}
        self._texts: dict[Request, AnswerText] = {}
        self._events: list[StreamEvent] = []
        self._inflight: deque[InflightStep] = deque()
        self._last_fed: list[Request] = []
        self._num_shortages = 0
        self._num_added = 0

    @classmethod
    def from_pretrained(cls, path: str | Path, decoder: str | None = None, **options: Any) -> Engine:
        """Load a checkpoint directory. `decoder` None: "block" where it is block-causal, "isd" where it
        was converted, else "ar".

        `options` are the fields of `EngineSettings` (device, dtype, max_num_seqs, memory, ...) and of the
        decoder's own Config (for isd: stride, rejection_strategy, acceptance). `accelerators` is one of the former:
        a name, names, or options by name, {"mage": {"k": 256}}. Raises UserError for anything
        unusable. With `tensor_parallel=n` the engine starts n-1 further processes; `close` ends them, as does
        the end of this one.
        """
        directory = given_path("IDLM-0600", path, fix="give the directory of a checkpoint")
        worker = create_worker(directory, decoder, options)
        return cls(worker.parts, worker)

    def close(self) -> None:
        """End what was started for this engine; with `tensor_parallel` it is of no use afterwards."""
        self._worker.close()

    @property
    def settings(self) -> EngineSettings:
        """What the engine was built with."""
        return self._parts.settings

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        request_ids: Sequence[str] | None = None,
    ) -> list[Completion]:
        """Answers in the order of the prompts; `n` samples of a prompt stand next to each other.

        Raises UserError IDLM-0448, and aborts the rest, when memory is too short for one of them, and
        IDLM-0457 when its logits are not finite; those who want the other answers call `add_request` and
        `step`.
        """
        keys = self._add_all(prompts, params, request_ids)
        own = {request_id for request_id, _ in keys}
        done: dict[tuple[str, int], Completion] = {}
        try:
            while len(done) < len(keys):
                for event in self._own_events(own):
                    if event.completion is not None:
                        done[event.request_id, event.index] = event.completion
        except BaseException:
            self._drop(own)
            raise
        return [done[key] for key in keys]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[StreamEvent]:
        """Events of one prompt as passes finish; closing the iterator aborts the request.

        The request is checked and queued at once, before the first event is asked for. UserError as from
        `generate`.
        """
        check_one(prompt)
        [(request_id, _), *_] = keys = self._add_all([prompt], params, None, streams=True)
        events = self._events_of(request_id, len(keys))
        # Enter the `try`: only then does closing an iterator that nobody read abort its request.
        next(events)
        return cast(Iterator[StreamEvent], events)

    def _events_of(self, request_id: str, open_samples: int) -> Iterator[StreamEvent | None]:
        try:
            yield None
            while open_samples:
                for event in self._own_events({request_id}):
                    open_samples -= event.completion is not None
                    yield event
        finally:
            self._drop([request_id])

    def add_request(
        self, request_id: str, prompt: Prompt, params: SamplingParams | None = None, *, streams: bool = False
    ) -> None:
        """Queue a prompt (text, or token ids as they are). `streams`: decode text in every event, not only at
        the end.
        """
        self._check_new(request_id)
        for request in self._admission.samples(request_id, prompt, params):
            self._num_added += 1
            self._active.setdefault(request_id, []).append(request)
            stop = request.params.stop
            if (stop or streams) and self.tokenizer is not None:
                self._texts[request] = AnswerText(self._parts.detokenizer(), stop)
            self.scheduler.add(request)

    def check_request(self, request_id: str, prompt: Prompt, params: SamplingParams | None = None) -> None:
        """Raise the UserError that `add_request` would raise, and queue nothing. Whether the id is free is
        not looked at.
        """
        self._admission.samples(request_id, prompt, params)

    def abort(self, request_id: str) -> list[Completion]:
        """Stop a request wherever it is; returns what it had, [] when it is not (or no longer) here."""
        completions = []
        # What is no text names no request, and need not be hashable.
        for request in list(self._active.get(request_id, ()) if isinstance(request_id, str) else ()):
            request.finish_reason = "abort"
            completions.append(self._finish(request))
        return completions

    def _drop(self, request_ids: Collection[str]) -> None:
        """Abort requests whose reader is gone; nobody else asks for their events."""
        for request_id in request_ids:
            self.abort(request_id)
        self._events = [event for event in self._events if event.request_id not in request_ids]

    @property
    def has_work(self) -> bool:
        """Whether a request is not finished, or an event not fetched."""
        return bool(self._active or self._events)

    def step(self) -> list[StreamEvent]:
        """Launch one forward pass for everyone who fits; returns what has come back since the last call.

        That may be nothing: a pass that only stores prompts has no news. `has_work` says when to stop.
        """
        self._pass()
        events, self._events = self._events, []
        return events

    def _own_events(self, request_ids: set[str]) -> list[StreamEvent]:
        """One pass; events of other requests wait for their own reader or the next `step`."""
        self._pass()
        events = self._events
        self._events = [event for event in events if event.request_id not in request_ids]
        own = [event for event in events if event.request_id in request_ids]
        error = next((event.error for event in own if event.error is not None), None)
        if error is not None:
            raise error
        return own

    def _pass(self) -> None:
        """Launch a pass and book those that are back. A pass that fails is as if it had never begun; where
        memory was short, the next ones are smaller.
        """
        shortage = None
        try:
            is_launched = self._launch()
            self._book((self.settings.num_inflight_steps or 0) if is_launched else 0)
        except BaseException as error:
            self._inflight.clear()
            self.scheduler.requeue_all()
            if not is_out_of_memory(error):
                raise
            shortage = str(error)
        # Behind the `except`: its traceback holds the tensors of the pass.
        if shortage is not None:
            self._make_room(shortage)
        elif is_launched:
            self._num_shortages = 0
            self.scheduler.restore_budget()

    def _make_room(self, reason: str) -> None:
        """After a shortage: a smaller pass; from the second in a row on, one request less, the youngest."""
        self._num_shortages += 1
        self.scheduler.halve_budget()
        self._stride_controller.observe_out_of_memory()
        self._worker.free_cached_memory()
        youngest = next((one for one in reversed(self._last_fed) if one.finish_reason is None), None)
        if self._num_shortages < MIN_CONSECUTIVE_OOM or youngest is None:
            return
        most_rows = self.settings.max_num_batched_tokens
        self._give_up(
            youngest,
            given_up(youngest.request_id, self._num_shortages, reason, max_num_batched_tokens=most_rows),
        )

    def _fail_nonfinite(self, request: Request) -> None:
        """Nothing that it computed may serve others."""
        num_tokens, dtype = len(request.token_ids), self._parts.model.dtype
        self._give_up(request, not_finite(request.request_id, num_tokens, dtype=dtype), invalidate=True)

    def _give_up(self, request: Request, error: UserError, *, invalidate: bool = False) -> None:
        """End a request with what it has. `invalidate`: see `Scheduler.retire`."""
        request.finish_reason = "error"
        text = self._texts[request].finish() if request in self._texts else ""
        self._events.append(
            StreamEvent(
                request_id=request.request_id,
                index=request.index,
                token_ids=(),
                text=text,
                completion=self._finish(request, error, invalidate=invalidate),
                error=error,
            )
        )

    def _launch(self) -> bool:
        """Send the next pass on its way; False when there is none."""
        schedule = self.scheduler.next()
        if schedule is None:
            # Who loses its pages is decided by what is known, not by what may be on its way.
            self._book(0)
            schedule = self.scheduler.next()
        assert schedule is not None, f"{len(self._inflight)=}"
        if not schedule.requests:
            return False
        self._last_fed = schedule.requests
        schedule.mode = self._stride_controller.choose(len(schedule.requests))
        self._inflight.append(InflightStep(schedule, self._worker))
        schedule.launched()
        return True

    def _book(self, num_left: int) -> None:
        """Read results, oldest first: all that are back, then more until `num_left` are on their way."""
        while self._inflight and (len(self._inflight) > num_left or self._inflight[0].is_ready()):
            inflight_step = self._inflight.popleft()
            emissions = inflight_step.emissions()
            if inflight_step.only_decodes:
                self._stride_controller.observe_time(
                    inflight_step.mode, len(inflight_step.requests), inflight_step.seconds()
                )
            for request, samples, emission in zip(
                inflight_step.requests, inflight_step.samples, emissions, strict=True
            ):
                # A request that was found complete, or was aborted, while this pass was on its way.
                if request.finish_reason is None:
                    self._deliver(request, samples, emission)

    def _deliver(self, request: Request, samples: bool, emission: Emission) -> None:
        """Book what a pass committed for one request, finish it if it is done."""
        request.num_forwards += 1
        if not samples:
            return
        if emission.nonfinite == 1:
            self._fail_nonfinite(request)
            return
        num_before = request.num_known
        new_ids, text = self._append(request, emission.token_ids)
        self.scheduler.book(request, num_before, waited=emission.waited)
        if not new_ids:
            return
        request.num_steps += 1
        # Behind a stop nothing counts: the drafts there belong to no answer.
        accepted, is_cut = emission.num_accepted, len(new_ids) <= emission.num_accepted
        request.count_drafts(min(accepted, len(new_ids)), len(new_ids) if is_cut else emission.num_tested)
        self._stride_controller.observe_drafts(accepted, emission.num_tested)
        request.logprobs += emission.logprobs[: len(new_ids)]
        is_done = request.finish_reason is not None
        text += self._texts[request].finish() if is_done and request in self._texts else ""
        self._events.append(
            StreamEvent(
                request_id=request.request_id,
                index=request.index,
                token_ids=tuple(new_ids),
                text=text,
                completion=self._finish(request) if is_done else None,
            )
        )
        if emission.nonfinite and not is_done:
            self._fail_nonfinite(request)

    def _append(self, request: Request, token_ids: list[int]) -> tuple[list[int], str]:
        """Add committed tokens one by one until something stops the answer."""
        answer = self._texts.get(request)
        text = ""
        for count, token_id in enumerate(token_ids, start=1):
            request.push(token_id)
            if answer is not None and token_id not in request.stop_ids:
                text += answer.push([token_id])
                if answer.is_stopped:
                    request.finish_reason = "stop"
            if request.finish_reason is not None:
                return token_ids[:count], text
        return token_ids, text

    def _finish(
        self, request: Request, error: UserError | None = None, *, invalidate: bool = False
    ) -> Completion:
        self.scheduler.retire(request, invalidate=invalidate)
        samples = self._active[request.request_id]
        samples.remove(request)
        if not samples:
            del self._active[request.request_id]
        answer = self._texts.pop(request, None)
        if answer is not None:
            answer.finish()
            text = answer.text
        else:
            text = self._parts.decode(strip_stop_id(request.token_ids, request.stop_ids))
        is_lossy = self._parts.is_lossy or request.params.tau > 0
        return request.complete(text, "lossy" if is_lossy else "exact", error=error)

    def _add_all(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        request_ids: Sequence[str] | None,
        *,
        streams: bool = False,
    ) -> list[tuple[str, int]]:
        check_list(prompts)
        settings = (
            list(params)
            if isinstance(params, Sequence)
            else [SamplingParams() if params is None else params] * len(prompts)
        )
        taken = {*self._active, *(event.request_id for event in self._events)}
        fresh = fresh_ids(self._num_added, len(prompts), taken)
        ids = fresh if request_ids is None else list(request_ids)
        if not len(prompts) == len(settings) == len(ids):
            raise UserError(
                "IDLM-0408",
                f"{len(prompts)} prompts, {len(settings)} params and {len(ids)} request ids do not match",
                fix="give one SamplingParams for all or one per prompt, and one id per prompt or none",
            )
        added: list[str] = []
        try:
            for request_id, prompt, setting in zip(ids, prompts, settings, strict=True):
                self.add_request(request_id, prompt, setting, streams=streams)
                added.append(request_id)
        except BaseException:
            self._drop(added)
            raise
        return [(name, k) for name, setting in zip(ids, settings, strict=True) for k in range(setting.n)]

    def _check_new(self, request_id: str) -> None:
        if not isinstance(request_id, str):
            raise UserError("IDLM-0409", f"request id {request_id!r} is no text", fix="give a string")
        is_unread = any(event.request_id == request_id for event in self._events)
        if request_id in self._active or is_unread:
            state = "has news that step() has not returned yet" if is_unread else "is in use"
            raise UserError(
                "IDLM-0409", f"request id {request_id!r} {state}", fix="give every request its own id"
            )
