"""What passes cost on this machine at present, as far as it has been measured. Knows no model and no tensor."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from statistics import median
from threading import Lock

PRIOR_SLOPE = 0.1  # before it is measured, one more token in a verify pass is taken to cost a tenth of a pass
TRUSTED_SAMPLES = 4
SAMPLES = 15
FORGET_AFTER = 50  # plain passes, after which every other cost loses its oldest sample
PACE_SAMPLES = 3  # plain passes that tell how fast the machine is at the moment
COMPARABLE = 16  # passes after a plain one, as long as they are taken to be run at its pace
STALE = 128  # passes after a plain one, when another one has to be run

CostKey = tuple[str, int]
PLAIN: CostKey = ("verify", 1)

_lock = Lock()  # of all tables, since a table with one of its own could not be copied


class CostTable:
    """Running costs of passes on this machine, in milliseconds.

    Keys are `("verify", width)` for a full-depth pass over `width` tokens (width 1 is plain decoding) and
    `("draft", exit_layer)` for one draft token. How fast a machine is changes with what else it does, by the second: so
    other costs are kept as multiples of what plain passes cost just before them. Until a key has a few samples its
    estimate leans on an optimistic prior, so that it gets tried; what is not used is forgotten by and by, so that it is
    tried again.

    Calls in several threads may share a table.

    Args:
        num_layers: Decoder layers of the base model, for the prior of a draft step.
        head_share: Share of the output head in a pass's weights, likewise.
        widths: Those of verify passes, where others are filled up; none where a pass has the width that it is asked to.
    """

    def __init__(self, num_layers: int, head_share: float = 0.0, widths: Sequence[int] = ()) -> None:
        self.num_layers = num_layers
        self.head_share = head_share
        self.widths = tuple(widths)
        self._samples: dict[CostKey, deque[float]] = {}  # in plain passes
        self._medians: dict[CostKey, float] = {}
        self._estimates: dict[CostKey, float] = {}  # since the last change: asking is part of every round
        self._plain_ms: deque[float] = deque(maxlen=SAMPLES)
        self._pace = 1.0  # milliseconds of a plain pass at present
        self._plain_passes = 0
        self._since_plain = 0

    def resized(self) -> CostTable:
        """A table for a batch of another size, which takes these costs for a first guess."""
        table = CostTable(self.num_layers, self.head_share, self.widths)
        with _lock:
            if self._plain_ms:
                table._plain_ms.append(self._pace)
                table._pace, table._plain_passes = self._pace, 1
            for key, value in self._medians.items():
                table._samples[key] = deque([value], maxlen=SAMPLES)
                table._medians[key] = value
        return table

    def record(self, key: CostKey, milliseconds: float) -> None:
        """Add a measurement. The first of each key is dropped: it pays for buffers and kernel choices."""
        with _lock:
            if key == PLAIN:
                self._record_plain(milliseconds)
                return
            self._since_plain += key[0] == "verify"
            if key not in self._samples:
                self._samples[key] = deque(maxlen=SAMPLES)
            elif self.ready and self._since_plain <= COMPARABLE:
                self._samples[key].append(milliseconds / self._pace)
                self._update(key)

    @property
    def ready(self) -> bool:
        """Whether plain decoding, against which everything is compared, has been measured, and not too long ago."""
        return bool(self._plain_ms) and self._since_plain < STALE

    @property
    def plain(self) -> float | None:
        """Measured milliseconds of plain decoding, once they can be trusted."""
        with _lock:
            return median(self._plain_ms) if len(self._plain_ms) >= TRUSTED_SAMPLES else None

    def verify(self, width: int) -> float:
        """Expected milliseconds of a full-depth pass over `width` tokens; never more than of a wider one."""
        if self.widths:
            if width > self.widths[-1]:
                return math.inf
            width = step_width(width, self.widths)
        key = ("verify", width)
        with _lock:
            if key not in self._estimates:
                wider = [known for kind, known in self._medians if kind == "verify" and known > width > 1]
                self._estimates[key] = min(self._verify(known) for known in (width, *wider))
            return self._estimates[key] * self._pace

    def draft(self, exit_layer: int) -> float:
        """Expected milliseconds of one draft token from `exit_layer`."""
        key = ("draft", exit_layer)
        with _lock:
            if key not in self._estimates:
                share = self.head_share + (1 - self.head_share) * exit_layer / self.num_layers
                self._estimates[key] = self._blend(key, share)
            return self._estimates[key] * self._pace

    def _record_plain(self, milliseconds: float) -> None:
        self._since_plain = 0
        self._plain_passes += 1
        if self._plain_passes == 1:
            return
        self._plain_ms.append(milliseconds)
        self._pace = median(list(self._plain_ms)[-PACE_SAMPLES:])
        if self._plain_passes % FORGET_AFTER == 0:
            for key, samples in self._samples.items():
                if samples:
                    samples.popleft()
                self._update(key)

    def _update(self, key: CostKey) -> None:
        self._estimates.clear()
        if self._samples[key]:
            self._medians[key] = median(self._samples[key])
        else:
            self._medians.pop(key, None)

    def _verify(self, width: int) -> float:
        return self._blend(("verify", width), self._interpolate(width))

    def _blend(self, key: CostKey, prior: float) -> float:
        measured, count = self._medians.get(key), len(self._samples.get(key, ()))
        if measured is None:
            return prior
        if count >= TRUSTED_SAMPLES:
            return measured
        return (measured * count + min(prior, measured)) / (count + 1)

    def _interpolate(self, width: int) -> float:
        """Cost of an unmeasured width between, or beyond, the trusted ones."""
        known = [(1, 1.0)]
        for (kind, measured_width), value in self._medians.items():
            if kind == "verify" and len(self._samples[kind, measured_width]) >= TRUSTED_SAMPLES:
                known.append((measured_width, value))
        known.sort()
        below = [point for point in known if point[0] <= width][-1]
        above = next((point for point in known if point[0] > width), None)
        if above is None:
            return below[1] + PRIOR_SLOPE * (width - below[0])
        share = (width - below[0]) / (above[0] - below[0])
        return below[1] + share * (above[1] - below[1])


def step_width(tokens: int, widths: Sequence[int]) -> int:
    """The width, of those that there are, of the verify pass that serves for so many tokens."""
    return next(width for width in widths if width >= tokens)
