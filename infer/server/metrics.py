"""What /metrics serves: counts and times under vLLM's names where it has them, so that its dashboards and
schedulers read them; ours begin with `idlm:`.
"""

from __future__ import annotations

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)

from idlm.infer.server.messages import Figures, Stats

LABEL, POSITION, REASON = "model_name", "position", "finished_reason"
TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
REQUEST_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
TOTALS = {
    "num_preemptions": "vllm:num_preemptions",
    "num_cache_queries": "vllm:prefix_cache_queries",
    "num_cache_hits": "vllm:prefix_cache_hits",
}
"""Fields of `Stats` that count, and their metrics."""


class Metrics:
    """The metrics of one server, in a registry of its own."""

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self._model_name, self._last = model_name, Stats(0, 0, 0.0, 0, 0, 0)
        ProcessCollector(registry=self.registry)
        self._running = self._gauge("vllm:num_requests_running", "Samples that have a lane")
        self._waiting = self._gauge("vllm:num_requests_waiting", "Samples in the engine's queue")
        self._kv_usage = self._gauge("vllm:kv_cache_usage_perc", "Share of the KV pages in use, 0 to 1")
        self._ready = self._gauge("idlm:engine_ready", "1 if the engine takes requests")
        self._restarts = self._counter("idlm:engine_restarts", "Engine processes that ended unasked")
        self._totals = {
            field: self._counter(name, f"{field} of the engine") for field, name in TOTALS.items()
        }
        self._prompt = self._counter("vllm:prompt_tokens", "Prompt tokens of finished requests")
        self._generated = self._counter("vllm:generation_tokens", "Emitted tokens")
        self._forwards = self._counter("idlm:request_forwards", "Forward passes of finished samples")
        self._success = self._counters("vllm:request_success", "Finished samples", REASON)
        self._refused = self._counters("idlm:responses", "HTTP responses", "status")
        self._drafts = self._counter("vllm:spec_decode_num_draft_tokens", "Tested drafts")
        self._accepted = self._counter("vllm:spec_decode_num_accepted_tokens", "Accepted drafts")
        self._tested_at = self._counters(
            "idlm:spec_decode_num_draft_tokens_per_pos", "Tested drafts", POSITION
        )
        self._accepted_at = self._counters(
            "vllm:spec_decode_num_accepted_tokens_per_pos", "Accepted drafts", POSITION
        )
        self._first_token = self._histogram(
            "vllm:time_to_first_token_seconds", "From the request to its first token", REQUEST_SECONDS
        )
        self._between = self._histogram(
            "vllm:inter_token_latency_seconds", "Between the emissions of a sample, per token", TOKEN_SECONDS
        )
        self._whole = self._histogram(
            "vllm:e2e_request_latency_seconds", "From the request to its end", REQUEST_SECONDS
        )

    def step(self, stats: Stats) -> None:
        """The engine's state after a step."""
        self._running.set(stats.num_running)
        self._waiting.set(stats.num_waiting)
        self._kv_usage.set(stats.kv_usage)
        for field, counter in self._totals.items():
            counter.inc(getattr(stats, field) - getattr(self._last, field))
        self._last = stats

    def engine_ready(self) -> None:
        """A fresh engine takes requests."""
        self._last = Stats(0, 0, 0.0, 0, 0, 0)
        self.step(self._last)
        self._ready.set(1)

    def engine_lost(self) -> None:
        """The engine process ended unasked."""
        self._ready.set(0)
        self._restarts.inc()
        self.step(self._last._replace(num_running=0, num_waiting=0, kv_usage=0.0))

    def emitted(self, num_tokens: int) -> None:
        """Tokens of one event."""
        self._generated.inc(num_tokens)

    def finished(self, figures: Figures) -> None:
        """One sample."""
        self._success.labels(self._model_name, figures.finish_reason).inc()
        self._forwards.inc(figures.num_forwards)
        self._drafts.inc(sum(figures.tested))
        self._accepted.inc(sum(figures.accepted))
        for place, (tested, accepted) in enumerate(zip(figures.tested, figures.accepted, strict=True)):
            self._tested_at.labels(self._model_name, str(place)).inc(tested)
            self._accepted_at.labels(self._model_name, str(place)).inc(accepted)

    def prompt(self, num_tokens: int) -> None:
        """The prompt of a request that the engine has taken."""
        self._prompt.inc(num_tokens)

    def first_token(self, seconds: float) -> None:
        """The time from a request to its first token."""
        self._first_token.observe(seconds)

    def between_tokens(self, seconds: float) -> None:
        """The time between two emissions of a sample, divided by the tokens of the second one."""
        self._between.observe(seconds)

    def request_ended(self, seconds: float) -> None:
        """The time from a request to its end."""
        self._whole.observe(seconds)

    def responded(self, status: int) -> None:
        """An HTTP response."""
        self._refused.labels(self._model_name, str(status)).inc()

    def render(self) -> bytes:
        """The metrics in Prometheus' text format."""
        return generate_latest(self.registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(name, text, (LABEL,), registry=self.registry).labels(self._model_name)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, (LABEL,), registry=self.registry).labels(self._model_name)

    def _counters(self, name: str, text: str, label: str) -> Counter:
        return Counter(name, text, (LABEL, label), registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        made = Histogram(name, text, (LABEL,), registry=self.registry, buckets=buckets)
        return made.labels(self._model_name)
