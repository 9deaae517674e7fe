"""What /metrics serves: counts and times under vLLM's names where it has them, so that its dashboards and
schedulers read them; ours begin with `idlm:`."""

from __future__ import annotations

from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)

from idlm.infer.server.messages import IDLE, EngineInfo, Figures, Stats

TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
REQUEST_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
GAUGES = {
    "num_running": ("vllm:num_requests_running", "Samples that have a lane"),
    "num_waiting": ("vllm:num_requests_waiting", "Samples in the engine's queue, or waiting for a grammar"),
    "kv_usage": ("vllm:kv_cache_usage_perc", "Share of the KV pages in use, 0 to 1"),
}
COUNTERS = {
    "num_preemptions": ("vllm:num_preemptions", "Samples that gave their pages back for a while"),
    "num_cache_queries": ("vllm:prefix_cache_queries", "Tokens looked up in the prefix cache"),
    "num_cache_hits": ("vllm:prefix_cache_hits", "Tokens found there"),
}
"""Fields of `Stats`, and their metrics."""


class Metrics:
    """The metrics of one server, in a registry of its own."""

    def __init__(self, model_name: str) -> None:
        disable_created_metrics()
        self._model_name, self._last = model_name, IDLE
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self._gauges = {field: self._make(Gauge, *named) for field, named in GAUGES.items()}
        self._counters = {field: self._make(Counter, *named) for field, named in COUNTERS.items()}
        self._ready = self._make(Gauge, "idlm:engine_ready", "1 if the engine takes requests")
        self._cache_config = self._make(
            Gauge,
            "vllm:cache_config_info",
            "Size of the KV cache, in the labels",
            ("block_size", "num_gpu_blocks"),
        )
        self._restarts = self._make(Counter, "idlm:engine_restarts", "Engine processes that ended unasked")
        self.prompt_tokens = self._make(Counter, "vllm:prompt_tokens", "Tokens of prompts taken")
        self.generation_tokens = self._make(Counter, "vllm:generation_tokens", "Emitted tokens")
        self._forwards = self._make(Counter, "idlm:request_forwards", "Forward passes of finished samples")
        drafts, position = "vllm:spec_decode_num_draft_tokens", ("position",)
        accepted = "vllm:spec_decode_num_accepted_tokens"
        self._drafts = self._make(
            Counter, "vllm:spec_decode_num_drafts", "Passes that tested drafts, for each sample"
        )
        self._tested = self._make(Counter, drafts, "Tested drafts")
        self._accepted = self._make(Counter, accepted, "Accepted drafts")
        self._tested_at = self._make(
            Counter, "idlm:spec_decode_num_draft_tokens_per_pos", "Tested drafts", position
        )
        self._accepted_at = self._make(Counter, f"{accepted}_per_pos", "Accepted drafts", position)
        self._success = self._make(Counter, "vllm:request_success", "Finished samples", ("finished_reason",))
        self._responses = self._make(Counter, "idlm:responses", "HTTP responses", ("status",))
        self.first_token = self._make(
            Histogram,
            "vllm:time_to_first_token_seconds",
            "From a request to its first token",
            (),
            REQUEST_SECONDS,
        )
        self.between_tokens = self._make(
            Histogram,
            "vllm:inter_token_latency_seconds",
            "Between two emissions of a sample, divided by the tokens of the second one",
            (),
            TOKEN_SECONDS,
        )
        self.whole_request = self._make(
            Histogram, "vllm:e2e_request_latency_seconds", "From a request to its end", (), REQUEST_SECONDS
        )

    def step(self, stats: Stats) -> None:
        for field, gauge in self._gauges.items():
            gauge.set(getattr(stats, field))
        for field, counter in self._counters.items():
            counter.inc(getattr(stats, field) - getattr(self._last, field))
        self._last = stats

    def engine_ready(self, info: EngineInfo) -> None:
        self._last = IDLE
        self._cache_config.clear()
        self._cache_config.labels(self._model_name, str(info.page_size), str(info.num_pages)).set(1)
        self._ready.set(1)

    def engine_lost(self) -> None:
        """The engine process ended unasked."""
        self._ready.set(0)
        self._restarts.inc()
        self.step(self._last._replace(num_running=0, num_waiting=0, kv_usage=0.0))

    def finished(self, figures: Figures) -> None:
        self._success.labels(self._model_name, figures.finish_reason).inc()
        self._forwards.inc(figures.num_forwards)
        # Every pass with drafts tests the first one.
        self._drafts.inc(figures.tested[0] if figures.tested else 0)
        self._tested.inc(sum(figures.tested))
        self._accepted.inc(sum(figures.accepted))
        for place, (tested, accepted) in enumerate(zip(figures.tested, figures.accepted, strict=True)):
            self._tested_at.labels(self._model_name, str(place)).inc(tested)
            self._accepted_at.labels(self._model_name, str(place)).inc(accepted)

    def responded(self, status: int) -> None:
        self._responses.labels(self._model_name, str(status)).inc()

    def render(self) -> bytes:
        return generate_latest(self._registry)

    def _make(
        self, kind: Any, name: str, text: str, labels: tuple[str, ...] = (), buckets: tuple[float, ...] = ()
    ) -> Any:
        """A metric with the label `model_name`; users give the values of further `labels`."""
        options = {"buckets": buckets} if buckets else {}
        made = kind(name, text, ("model_name", *labels), registry=self._registry, **options)
        return made if labels else made.labels(self._model_name)
