"""What the server counts, in the text form of Prometheus."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from .protocol import Finished

WORK = {  # what a served model counts
    "batches": "Batches decoded.",
    "batch_rows": "Requests in them.",
    "tokens": "Tokens decoded, those of cancelled requests included.",
    "layers_executed": "Decoder layers executed, counted per row and pass, prompts included.",
    "layers_plain": "Decoder layers that plain decoding executes for as many tokens.",
    "drafted": "Draft tokens verified.",
    "accepted": "Draft tokens accepted.",
}


class Metrics:
    """The counts of one server."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.responses = Counter(
            "tide_responses",
            "HTTP responses (status 499: the client left first).",
            ["path", "status"],
            registry=self.registry,
        )
        self.requests = Gauge("tide_requests_open", "Chat requests waiting or being answered.", registry=self.registry)
        self.prompt_tokens = self._counter("tide_prompt_tokens", "Tokens of accepted prompts.")
        self.completion_tokens = self._counter("tide_completion_tokens", "Tokens of complete answers.")
        self.resubmitted = self._counter("tide_resubmitted", "Requests given to another replica after one was lost.")
        self.work = {name: self._counter(f"tide_{name}", text) for name, text in WORK.items()}
        self.totals = dict.fromkeys(WORK, 0)
        depth = Gauge("tide_depth_fraction", "Layers executed over those of plain decoding.", registry=self.registry)
        depth.set_function(lambda: self._ratio("layers_executed", "layers_plain"))
        rate = Gauge("tide_acceptance_rate", "Share of the draft tokens accepted.", registry=self.registry)
        rate.set_function(lambda: self._ratio("accepted", "drafted"))

    def finish(self, finished: Finished) -> None:
        """Count a complete answer, and the work that it reports."""
        self.completion_tokens.inc(finished.completion_tokens)
        for name, count in finished.work.items():
            self.work[name].inc(count)
            self.totals[name] += count

    def render(self) -> bytes:
        """All of it."""
        return generate_latest(self.registry)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, registry=self.registry)

    def _ratio(self, part: str, whole: str) -> float:
        return self.totals[part] / self.totals[whole] if self.totals[whole] else 0.0
