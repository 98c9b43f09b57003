"""``ExitStats``: counts of what one ``generate`` call executed."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class ExitStats:
    """Counts of one `generate` call.

    Attributes:
        mode: The mode that ran.
        num_layers: Decoder layers of the base model.
        layers_executed: Decoder layers executed completely, counted once per row and forward pass, however many tokens
            the pass is over; prefill, draft and verify passes included.
        per_token: For each row, the exit layer of each new token: `num_layers` at full depth, 0 if no layer ran to
            choose it, as for an accepted draft token of an n-gram or a draft head.
        sources: For each row, what wrote each new token: the "draft head", an "exit layer 8", a "3-gram" of the row, a
            "remembered 12-gram" of an earlier answer, or a "full pass", which gives plain and bonus tokens.
        rounds: Draft-and-verify rounds (`self_speculative`).
        drafted: Draft tokens that were verified: all nodes of the trees that were tried.
        accepted: Draft tokens that the base model accepted and that are part of the output.
        engine: The engine that ran the layers.
        dtype: The model's dtype.
        compute_dtype: The dtype of activations, K/V and sums.
        fallback_reason: Why transformers' own loop decoded the call at full depth; `None` if TIDE decoded it. After
            a fallback, `layers_executed` is that of plain decoding.
        warm_up_s: Seconds that the call spent on engine warm-up, which later calls do not need.
        rule_is_exact: Whether draft tokens were accepted by the exact rule, the base model's own choice.
        busy_note: What to do where other programs kept the CPU so busy that several threads may have been slow.
    """

    mode: str
    num_layers: int
    layers_executed: int = 0
    per_token: list[list[int]] = field(default_factory=list)
    sources: list[list[str]] = field(default_factory=list)
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    engine: str = "eager"
    dtype: str = ""
    compute_dtype: str = ""
    fallback_reason: str | None = None
    warm_up_s: float = field(default=0.0, compare=False)
    rule_is_exact: bool = True
    busy_note: str | None = field(default=None, compare=False)

    @property
    def total_tokens(self) -> int:
        """New tokens, over all rows."""
        return sum(len(row) for row in self.per_token)

    @property
    def exits_per_layer(self) -> dict[int, int]:
        """Number of tokens by exit layer, without tokens at full depth."""
        counts = Counter(layer for row in self.per_token for layer in row)
        return {layer: count for layer, count in sorted(counts.items()) if layer != self.num_layers}

    @property
    def exit_rate(self) -> float:
        """Share of the tokens that came from an exit layer, an n-gram or a draft head."""
        return sum(self.exits_per_layer.values()) / self.total_tokens if self.total_tokens else 0.0

    @property
    def depth_fraction(self) -> float:
        """Layers executed, as a fraction of the layers that plain decoding executes for as many tokens."""
        plain = self.total_tokens * self.num_layers
        return self.layers_executed / plain if plain else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Share of the draft tokens that were accepted."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def mean_acceptance_length(self) -> float:
        """Mean number of tokens per draft-and-verify round, the bonus token included."""
        return (self.accepted + self.rounds) / self.rounds if self.rounds else 0.0

    def to_dict(self) -> dict[str, Any]:
        """All counts and the properties derived from them, ready for JSON."""
        derived = [name for name, member in vars(ExitStats).items() if isinstance(member, property)]
        return asdict(self) | {name: getattr(self, name) for name in derived}

    def headlines(self) -> list[str]:
        """Depth, engine and acceptance of the call in a few lines."""
        dtypes = (
            self.dtype if self.compute_dtype in ("", self.dtype) else f"{self.dtype} computed in {self.compute_dtype}"
        )
        lines = [] if self.fallback_reason is None else [f"decoded plainly, without TIDE: {self.fallback_reason}"]
        lines.append(
            f"{self.mode}: {self.total_tokens} tokens, {self.depth_fraction * self.num_layers:.1f} of "
            f"{self.num_layers} layers per token ({self.depth_fraction:.0%}), engine {self.engine!r}, {dtypes}"
        )
        if self.rounds:
            lines.append(
                f"{self.accepted} of {self.drafted} draft tokens accepted ({self.acceptance_rate:.0%}), "
                f"{self.mean_acceptance_length:.2f} tokens a pass"
                + ("" if self.rule_is_exact else ", by a rule that is not exact")
            )
        if self.warm_up_s:
            lines.append(f"{self.warm_up_s:.1f} s to warm up engine={self.engine!r}, once")
        return lines

    def summary(self) -> str:
        """The headlines, and the number of tokens by exit layer."""
        lines = self.headlines()
        for layer, count in self.exits_per_layer.items():
            where = f"exit layer {layer}" if layer else "drafted before any layer ran"
            lines.append(f"{where}: {count} tokens ({count / self.total_tokens:.0%})")
        lines += [self.busy_note] if self.busy_note else []
        return "\n".join(lines)

    def to_html(self, tokens: Any = None, tokenizer: Any = None) -> str:
        """The call as self-contained HTML: statistics, tokens coloured by source, and a legend. Text is escaped.

        Args:
            tokens: The new tokens without the prompt, as texts or token ids: a list or a tensor, for one row or all
                rows. If `None`, each token is shown as its exit layer.
            tokenizer: The model's tokenizer, needed to decode token ids.

        Raises:
            ConfigurationError: There are more or fewer tokens than in this call, or ids without a tokenizer.
        """
        from .display import stats_html  # noqa: PLC0415 - only needed for display

        return stats_html(self, tokens, tokenizer)

    def _repr_html_(self) -> str:
        return self.to_html()

    def plot(self) -> Any:
        """Plot the number of tokens by source, and the exit layer of each token.

        Returns:
            A matplotlib `Figure`, which notebooks show; `plot().savefig("depth.png")` saves it.

        Raises:
            MissingPackageError: matplotlib is not installed (`pip install tide-hf[plots]`).
        """
        from .display import stats_figure  # noqa: PLC0415

        return stats_figure(self)
