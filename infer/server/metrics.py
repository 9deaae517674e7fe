"""What /metrics serves: counts and times under vLLM's names where it has them, so that its dashboards and
schedulers read them; ours begin with `idlm:`."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import prometheus_client

from idlm.infer.server.messages import IDLE, EngineInfo, SampleCounts, Stats

TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
REQUEST_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
METRICS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
"""Kind, name, text and further labels of each metric; the first ones are fields of `Stats`."""


class Metrics:
    """The metrics of one server, in a registry of its own; all have the label `model_name`."""

    def __init__(self, model_name: str) -> None:
        prometheus_client.disable_created_metrics()
        self._model_name, self._last = model_name, IDLE
        self._registry = prometheus_client.CollectorRegistry()
        prometheus_client.ProcessCollector(registry=self._registry)
        self._made = {key: self._make(key, *spec) for key, spec in METRICS.items()}
        self.prompt_tokens = self._made["prompt_tokens"]
        self.generation_tokens = self._made["generation_tokens"]
        self.first_token, self.between_tokens = self._made["first_token"], self._made["between_tokens"]
        self.whole_request = self._made["whole_request"]

    def step(self, stats: Stats) -> None:
        for field, value, last in zip(Stats._fields, stats, self._last, strict=True):
            if METRICS[field][0] == "Gauge":
                self._made[field].set(value)
            else:
                self._made[field].inc(value - last)
        self._last = stats

    def engine_ready(self, info: EngineInfo) -> None:
        self._last = IDLE
        self._made["cache_config"].clear()
        self._made["cache_config"].labels(self._model_name, str(info.page_size), str(info.num_pages)).set(1)
        self._made["ready"].set(1)

    def engine_lost(self) -> None:
        self._made["ready"].set(0)
        self._made["restarts"].inc()
        self.step(self._last._replace(num_running=0, num_waiting=0, kv_usage=0.0))

    def finished(self, figures: SampleCounts) -> None:
        self._made["success"].labels(self._model_name, figures.finish_reason).inc()
        self._made["forwards"].inc(figures.num_forwards)
        # Every pass with drafts tests the first one.
        self._made["drafts"].inc(figures.tested[0] if figures.tested else 0)
        self._made["tested"].inc(sum(figures.tested))
        self._made["accepted"].inc(sum(figures.accepted))
        for index, (tested, accepted) in enumerate(zip(figures.tested, figures.accepted, strict=True)):
            self._made["tested_at"].labels(self._model_name, str(index)).inc(tested)
            self._made["accepted_at"].labels(self._model_name, str(index)).inc(accepted)

    def responded(self, status: int) -> None:
        self._made["responses"].labels(self._model_name, str(status)).inc()

    def render(self) -> bytes:
        return prometheus_client.generate_latest(self._registry)

    def _make(self, key: str, kind: str, name: str, text: str, *labels: str) -> Any:
        """A metric; users give the values of `labels`."""
        buckets = TOKEN_SECONDS if key == "between_tokens" else REQUEST_SECONDS
        options = {"registry": self._registry} | ({"buckets": buckets} if kind == "Histogram" else {})
        made = getattr(prometheus_client, kind)(name, text, ("model_name", *labels), **options)
        return made if labels else made.labels(self._model_name)
