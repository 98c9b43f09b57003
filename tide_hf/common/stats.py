"""``ExitStats``: what one ``generate`` call executed. Counted, never timed."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class ExitStats:
    """Counts of one call.

    Attributes:
        mode: The mode that ran.
        num_layers: Decoder layers of the base model.
        layers_executed: Decoder layers that ran to their end, each counted once per row and forward pass, the
            prompt's pass and all draft and verify passes included.
        per_token: For each row, the layer each new token was read from: an exit layer, `num_layers` for the base
            model's own, 0 for one that an n-gram drafted and the base model confirmed.
        rounds: Draft-and-verify rounds (`self_speculative` only).
        drafted: Draft tokens that were verified.
        accepted: Draft tokens that the base model confirmed and that are part of the output.
        mlp_tokens_skipped: Prompt tokens that an MLP did not have to see, counted once per layer (`early_exit` with
            `exits_in_prompt`).
        engine: What ran the layers.
        fallback_reason: Why the call decoded plainly, by transformers' own loop at full depth; `None` where TIDE
            decoded it. Then `layers_executed` is what plain decoding takes for as many tokens.
        warm_up_s: Seconds of the call that went into making that engine ready; later calls are spared them.
    """

    mode: str
    num_layers: int
    layers_executed: int = 0
    per_token: list[list[int]] = field(default_factory=list)
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    mlp_tokens_skipped: int = 0
    engine: str = "eager"
    fallback_reason: str | None = None
    warm_up_s: float = field(default=0.0, compare=False)

    @property
    def total_tokens(self) -> int:
        """New tokens, over all rows."""
        return sum(len(row) for row in self.per_token)

    @property
    def exits_per_layer(self) -> dict[int, int]:
        """Number of tokens by the layer they were read from, the base model's own left out."""
        counts = Counter(layer for row in self.per_token for layer in row)
        return {layer: count for layer, count in sorted(counts.items()) if layer != self.num_layers}

    @property
    def exit_rate(self) -> float:
        """Share of the tokens that were read from an exit layer or an n-gram."""
        return sum(self.exits_per_layer.values()) / self.total_tokens if self.total_tokens else 0.0

    @property
    def depth_fraction(self) -> float:
        """Layers executed over those that plain decoding executes for as many tokens (1.0 for plain decoding)."""
        plain = self.total_tokens * self.num_layers
        return self.layers_executed / plain if plain else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Share of the draft tokens that were accepted."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens per draft-and-verify round, the bonus token included."""
        return (self.accepted + self.rounds) / self.rounds if self.rounds else 0.0

    def to_dict(self) -> dict[str, Any]:
        """All counts and what follows from them, ready for JSON."""
        derived = (
            "total_tokens",
            "exits_per_layer",
            "exit_rate",
            "depth_fraction",
            "acceptance_rate",
            "mean_acceptance_length",
        )
        return asdict(self) | {name: getattr(self, name) for name in derived}

    def headlines(self) -> list[str]:
        """How deep tokens ran and, where there were drafts, how many were accepted; a line each, for people."""
        layers = self.depth_fraction * self.num_layers
        lines = [] if self.fallback_reason is None else [f"decoded plainly, without TIDE: {self.fallback_reason}"]
        lines += [
            f"{self.mode}: {self.total_tokens} tokens, {layers:.1f} of {self.num_layers} layers per token "
            f"({self.depth_fraction:.0%})"
        ]
        if self.rounds:
            lines.append(
                f"{self.accepted} of {self.drafted} draft tokens accepted ({self.acceptance_rate:.0%}), "
                f"{self.mean_acceptance_length:.2f} tokens per round"
            )
        if self.warm_up_s:
            lines.append(f"{self.warm_up_s:.1f} s went into making engine={self.engine!r} ready, once")
        return lines

    def summary(self) -> str:
        """One paragraph for people."""
        lines = self.headlines()
        for layer, count in self.exits_per_layer.items():
            where = "n-grams" if layer == 0 else f"exit layer {layer}"
            lines.append(f"{where}: {count} tokens ({count / self.total_tokens:.0%})")
        return "\n".join(lines)

    def to_html(self, tokens: Any = None, tokenizer: Any = None) -> str:
        """The call as a piece of HTML that needs no other file: figures, tokens coloured by depth, a legend.

        Args:
            tokens: The new tokens, without the prompt: texts or token ids, a list or a tensor, of one row or of all
                rows. Without them each token is shown as the layer it was read from.
            tokenizer: The model's, to spell token ids.

        Returns:
            The HTML, in which all text is escaped.

        Raises:
            ConfigurationError: The tokens are not as many as this call's, or are ids without a tokenizer.
        """
        from .display.stats_views import stats_html  # noqa: PLC0415 - not needed by who only counts

        return stats_html(self, tokens, tokenizer)

    def _repr_html_(self) -> str:
        return self.to_html()

    def plot(self) -> Any:
        """Draw how many tokens were read from which layer, and the layer of each token.

        Returns:
            A matplotlib `Figure`, which a notebook shows by itself; `plot().savefig("depth.png")` writes it.

        Raises:
            MissingPackageError: matplotlib is not installed (`pip install tide-hf[plots]`).
        """
        from .display.stats_views import stats_figure  # noqa: PLC0415

        return stats_figure(self)
