"""Numbers for Prometheus: counters and gauges read from the engine at each scrape, times measured where answers pass."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric

from sejax.serve.request import EngineLike, Stats, Usage

PREFIX = "sejax_"  # the suffixes are those of other engines, so dashboards need only another prefix
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_GAPS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5, 10)

_GAUGES = {
    "num_requests_running": ("Requests being prefilled or decoded", lambda s: s.running),
    "num_requests_waiting": ("Requests queued", lambda s: s.waiting),
    "num_streaming_sessions": ("Sessions parked until their next turn", lambda s: s.parked),
    "num_slots": ("Sequences the cache has room for", lambda s: s.slots),
    "kv_cache_bytes": ("Device bytes of the cache, used or not", lambda s: s.kv_bytes),
    "kv_cache_usage_perc": ("Part of the cache's token rows in use, 0 to 1", lambda s: s.rows_held / max(s.rows_capacity, 1)),
    "kv_used_tokens": ("Token rows kept, mean over layers and heads", lambda s: s.rows_held),
    "kv_available_tokens": ("Token rows free, mean over layers and heads", lambda s: max(s.rows_capacity - s.rows_held, 0)),
    "kv_logical_tokens": ("Tokens that the kept rows stand for", lambda s: s.tokens_held),
    "engine_step_age_seconds": ("Time since the step loop last moved", lambda s: s.step_age),
}
_COUNTERS = {
    "prompt_tokens": ("Prompt tokens, reused ones included", lambda s: s.prompt_tokens),
    "prompt_tokens_cached": ("Prompt tokens reused", lambda s: s.cached_tokens),
    "prefix_cache_queries": ("Prompt tokens looked up for reuse", lambda s: s.prompt_tokens),
    "prefix_cache_hits": ("Prompt tokens found", lambda s: s.cached_tokens),
    "generation_tokens": ("Tokens generated", lambda s: s.generated_tokens),
    "evicted_tokens": ("Tokens dropped from the cache by the method", lambda s: s.evicted_tokens),
    "num_preemptions": ("Requests paused for lack of room", lambda s: s.preemptions),
    "admission_rejections": ("Requests refused because the queue was full", lambda s: s.rejected),
    "jit_compiles": ("Programs compiled", lambda s: s.compiles),
    "jit_compile_seconds": ("Time spent compiling", lambda s: s.compile_seconds),
}


class _Engine:
    """A Prometheus collector over `engine.stats()`."""

    def __init__(self, engine: EngineLike):
        self.engine = engine

    def collect(self) -> Iterator[Metric]:
        engine, stats = self.engine, self.engine.stats()
        for name, (text, read) in _GAUGES.items():
            yield GaugeMetricFamily(PREFIX + name, text, float(read(stats)))
        for name, (text, read) in _COUNTERS.items():
            yield CounterMetricFamily(PREFIX + name, text, float(read(stats)))
        yield self._finished(stats)
        info = {"model": engine.name, "method": str(engine.method), "max_model_len": str(engine.max_len)}
        yield InfoMetricFamily(PREFIX + "cache_config", "What is served", info)
        yield GaugeMetricFamily(PREFIX + "ready", "1 when requests are taken", float(engine.ready and engine.failure is None))

    def _finished(self, stats: Stats) -> Metric:
        family = CounterMetricFamily(PREFIX + "request_success", "Requests ended, by reason", labels=["finished_reason"])
        for reason in sorted({"stop", "length", "cancelled", "error", *stats.finished}):
            family.add_metric([reason], float(stats.finished.get(reason, 0)))
        return family


class Meters:
    """All metrics of one app, in a registry of its own."""

    def __init__(self, engine: EngineLike):
        self.registry = CollectorRegistry()
        self.registry.register(_Engine(engine))  # pyright: ignore[reportArgumentType]

        def histogram(name: str, text: str, buckets: tuple[float, ...] = _SECONDS) -> Histogram:
            return Histogram(PREFIX + name, text, buckets=buckets, registry=self.registry)

        self.first = histogram("time_to_first_token_seconds", "From the request's arrival to its first token")
        self.gap = histogram("inter_token_latency_seconds", "Between two tokens of one answer", _GAPS)
        self.whole = histogram("e2e_request_latency_seconds", "From the request's arrival to its last token")
        self.queue = histogram("request_queue_time_seconds", "From the request's arrival to its first prefill unit")
        self.prefill = histogram("request_prefill_time_seconds", "From the first prefill unit to the first token")
        self.decode = histogram("request_decode_time_seconds", "From the first to the last token")

    def text(self) -> bytes:
        return generate_latest(self.registry)

    def ended(self, began: float, first: float | None, now: float, usage: Usage) -> None:
        """One answer is complete; times are of one clock, in seconds. first: when its first token came."""
        self.whole.observe(now - began)
        self.queue.observe(usage.queued)
        self.prefill.observe(usage.prefill)
        if first is not None:
            self.decode.observe(now - first)
