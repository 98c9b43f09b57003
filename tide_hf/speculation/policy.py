"""Decide, by measured costs and acceptance rates, what to draft next, without access to models or tensors."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import median, median_low
from threading import Lock

FIRST_WIDTH = 4  # of the first pass over drafts at most; passes may then be twice as wide as any before
MAX_DRAFT = 15  # nodes of a tree
TOP_DRAFTS = 8  # tokens that a draft step, or a pass, offers as the next one
MOST_SURE = 0.97  # no token's probability is taken to be higher
DRAFT_LENGTHS = (1, 2, 3, 5, 7, 11, MAX_DRAFT)  # few, so that each verify width (length + 1) is measured often
MIN_GAIN = 1.05  # minimum expected speed-up of a draft over plain decoding, since measurements are noisy

PRIOR_SLOPE = 0.1  # prior cost of one more token in a verify pass, as a share of a plain pass
# The same for each row on accelerators, where plain weights take as long to read for several tokens: 1.5% for 16 tokens
# at an 8B model's shape on an H100.
ACCELERATOR_SLOPE = 0.001
FREE = 0.05  # a pass is wider than it need be if it costs no more than this beyond, so that fewer steps are prepared
TRUSTED_SAMPLES = 4
SAMPLES = 7
FORGET_AFTER = 50  # each time this many plain passes have run, every other cost loses its oldest sample
PACE_SAMPLES = 3  # latest plain passes, whose median cost is the machine's present pace
COMPARABLE = 16  # other costs are recorded only within this many verify passes after a plain pass
FEWEST_PLAIN = 2  # measured plain passes before anything is drafted, lest one interruption pass for the pace
LATEST_IDLE = 48  # number of rounds after an idle one after which the next is idle, to be measured again
STALE = 128  # number of verify passes without a plain pass after which a plain pass has to run
SURPRISE = 1.3  # a cost this many times its estimate calls for a plain pass, which shows the machine's present pace

# What drafting may lose, in plain passes. Estimates can be wrong, and machine and text can change.
FIRST_CREDIT = 3.0
MAX_CREDIT = 8.0  # gains beyond this are not set off against later losses
CREDIT_SHARE = 0.008  # further credit for each token
MAX_BOOKED = 6.0  # a pass is booked as this multiple of its estimate at most, lest one interruption end drafting

IDLE, PLAIN, DRAFTED = "idle", "plain", "drafted"  # kinds of rounds; in plain ones drafts are looked for in vain
CostKey = tuple[str, int]
PLAIN_PASS: CostKey = ("verify", 1)

_lock = Lock()  # shared by all tables, since a table with its own lock could not be copied


def draft_cost(exit_layer: int, num_layers: int, head_share: float, vocab_share: float) -> float:
    """Cost of a draft step in full-depth passes over one token, proportional to the weights read.

    `head_share`: output head's share of a full pass's weights; `vocab_share`: draft vocabulary's share of all tokens.
    """
    return (1 - head_share) * exit_layer / num_layers + head_share * vocab_share


class CostTable:
    """Running estimates of pass costs on this machine, in milliseconds. Calls in several threads may share a table.

    Keys are `("verify", width)` for a full-depth pass over `width` tokens (width 1 is plain decoding) and
    `("draft", exit_layer)` for one draft token. The speed of a machine changes by the second with its load, so costs
    are stored as multiples of the latest plain passes' cost. Until a key has a few samples, its estimate leans on an
    optimistic prior, so that the key gets tried; old samples are dropped over time, so that the key is tried again.

    The table also keeps the account of drafting: what its rounds have gained and lost against idle ones, in which
    nothing is looked for, as measured, with what the host does in them besides passes. So a search that finds nothing
    counts as a loss. Rounds are idle while more is lost than a small credit allows.

    Args:
        num_layers: Decoder layers of the base model, for the prior of a draft step.
        head_share: Share of the output head in the weights of a pass, for the same prior.
        vocab_share: Share of all tokens that drafts choose from, for the same prior.
        widths: Widths to which verify passes are padded; empty if a pass may have any width.
        slope: Prior cost of one more token in a verify pass, as a share of a plain pass.
    """

    def __init__(
        self,
        num_layers: int,
        head_share: float = 0.0,
        vocab_share: float = 1.0,
        widths: Sequence[int] = (),
        slope: float = PRIOR_SLOPE,
    ) -> None:
        self.num_layers, self.head_share, self.vocab_share = num_layers, head_share, vocab_share
        self.widths, self.slope = tuple(widths), slope
        self._samples: dict[CostKey, deque[float]] = {}  # in multiples of a plain pass
        self._medians: dict[CostKey, float] = {}
        self._estimates: dict[CostKey, float] = {}  # cached until the next change, since every round reads them
        self._plain_ms: deque[float] = deque(maxlen=SAMPLES)
        self._pace = 1.0  # milliseconds of a plain pass at present
        self._plain_passes = 0
        self._since_plain = 0
        self._credit = FIRST_CREDIT
        self._spent = 0.0  # in this round's draft steps, verify pass and the rest, in multiples of a plain pass
        # Times of rounds besides their passes, in multiples of a plain pass, by kind.
        self._rests: dict[str, deque[float]] = {kind: deque(maxlen=SAMPLES) for kind in (PLAIN, DRAFTED)}
        self._rests[IDLE] = deque(maxlen=PACE_SAMPLES)  # which are few
        self._is_off = False  # whether a drafter has said that it will not draft
        self._since_idle = 0  # rounds since the last idle one, this one included; 0 in an idle round

    def resized(self, slope: float) -> CostTable:
        """A table for a batch of another size, with these costs as a first guess."""
        table = CostTable(self.num_layers, self.head_share, self.vocab_share, self.widths, slope)
        with _lock:
            if self._plain_ms:
                table._plain_ms.extend([self._pace] * FEWEST_PLAIN)
                table._pace, table._plain_passes = self._pace, 1
            for key, value in self._medians.items():
                table._samples[key] = deque([value], maxlen=SAMPLES)
                table._medians[key] = value
        return table

    def record(self, key: CostKey, milliseconds: float, num_passes: int = 1, *, is_usual: bool = True) -> None:
        """Add the mean cost of `num_passes` passes. One that is not usual is booked, but estimates ignore it.

        The first of each key is booked alone, since it includes allocations and kernel choices.
        """
        with _lock:
            if key == PLAIN_PASS:
                self._spent += 1.0
                self._record_plain(milliseconds)
                return
            self._since_plain += key[0] == "verify"
            is_first = key not in self._samples
            if is_first:
                self._samples[key] = deque(maxlen=SAMPLES)
            if self.ready:
                self._record(key, milliseconds / self._pace, num_passes, is_usual and not is_first)

    def record_rest(self, milliseconds: float, has_drafts: bool) -> None:
        """Add the time of a round outside its passes, once these are recorded; `has_drafts` if it drafted anything."""
        with _lock:
            if len(self._plain_ms) < FEWEST_PLAIN:
                return
            rest, kind = milliseconds / self._pace, DRAFTED if has_drafts else IDLE if self.is_idle else PLAIN
            usual = self._rest(kind)
            self._rests[kind].append(rest)
            if self._spent:
                self._spent += min(rest, MAX_BOOKED * usual) if usual else rest

    @property
    def ready(self) -> bool:
        """Whether plain decoding, the baseline of all costs, has been measured recently enough."""
        return len(self._plain_ms) >= FEWEST_PLAIN and self._since_plain < STALE

    @property
    def may_draft(self) -> bool:
        """Whether drafting may be tried: its costs can be compared, and it has not lost more than it may."""
        return self.ready and self._credit > 0.0

    @property
    def is_idle(self) -> bool:
        """Whether nothing is to be looked for or drafted in this round."""
        return self._since_idle == 0

    @property
    def drafting_paused(self) -> bool:
        """Whether the next round will be idle too: drafting lost too much, is not wanted, or an idle round is due."""
        return self._is_off or self._credit + CREDIT_SHARE <= 0.0 or self._since_idle >= LATEST_IDLE

    @property
    def widest_to_try(self) -> int:
        """The widest pass that is worth trying, so that a machine on which width costs much shows it at little cost."""
        return max((2 * size for kind, size in list(self._samples) if kind == "verify"), default=FIRST_WIDTH)

    def begin_round(self, *, is_off: bool = False) -> None:
        """Begin a round; passes since the last one, such as those of a warm-up, are not booked.

        `is_off` says that nothing will be drafted, in this round or the next.
        """
        self._spent, self._is_off = 0.0, is_off
        is_idle = is_off or not self.may_draft or self._since_idle >= LATEST_IDLE
        self._since_idle = 0 if is_idle else self._since_idle + 1

    def end_round(self, num_tokens: float) -> None:
        """End a round that gave each row `num_tokens` tokens, on average: book what drafting gained or lost."""
        with _lock:
            is_booked = self._spent > 0.0 and not self.is_idle
            rest = min(self._rest(IDLE), self._rest(PLAIN))  # idle rounds do less, whatever they did on a busy machine
            gain = num_tokens * (1.0 + rest) - self._spent if is_booked else 0.0
            self._credit = min(MAX_CREDIT, self._credit + gain + CREDIT_SHARE * num_tokens)

    def verify(self, width: int) -> float:
        """Expected milliseconds of a full-depth pass over `width` tokens; no more than for any wider pass."""
        if self.widths:
            if width > self.widths[-1]:
                return math.inf
            width = self.pass_width(width)
        key = ("verify", width)
        with _lock:
            if key not in self._estimates:
                wider = [known for kind, known in self._medians if kind == "verify" and known > width > 1]
                self._estimates[key] = min(self._verify(known) for known in (width, *wider))
            return self._estimates[key] * self._pace

    def pass_width(self, num_tokens: int) -> int:
        """The width to which a pass is padded: of steps that hold the tokens the narrowest, or the widest if free."""
        width, widest = step_width(num_tokens, self.widths), self.widths[-1]
        return widest if width > 1 and self.slope * (widest - width) <= FREE else width

    def draft(self, exit_layer: int) -> float:
        """Expected milliseconds of one draft token from `exit_layer`."""
        key = ("draft", exit_layer)
        with _lock:
            if key not in self._estimates:
                self._estimates[key] = self._blend(key, self._prior(key))
            return self._estimates[key] * self._pace

    def rest(self, has_drafts: bool) -> float:
        """Expected milliseconds of a round outside its passes, if it is not idle."""
        with _lock:
            return self._rest(DRAFTED if has_drafts else PLAIN) * self._pace

    def _rest(self, kind: str) -> float:
        samples = self._rests[kind] or self._rests[PLAIN] or self._rests[IDLE]
        return median(samples) if samples else 0.0

    def _record(self, key: CostKey, cost: float, num_passes: int, is_usual: bool) -> None:
        known = self._medians.get(key)
        expected = known if known is not None else self._prior(key)
        self._spent += num_passes * min(cost, MAX_BOOKED * expected)
        if not is_usual:
            return
        usual = known if known is not None else cost
        is_comparable = self._since_plain <= COMPARABLE
        if is_comparable:
            self._samples[key].append(cost)
            self._update(key)
        is_dearer = not is_comparable and cost > SURPRISE * usual
        has_sped_up = key[0] == "verify" and SURPRISE * cost < 1.0  # a wider pass cannot be cheaper than a plain one
        if is_dearer or has_sped_up:
            self._since_plain = STALE

    def _record_plain(self, milliseconds: float) -> None:
        self._since_plain = 0
        self._plain_passes += 1
        if self._plain_passes == 1:
            return
        self._plain_ms.append(milliseconds)
        self._pace = median_low(list(self._plain_ms)[-PACE_SAMPLES:])
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

    def _prior(self, key: CostKey) -> float:
        """What a pass is expected to cost before it is measured."""
        kind, size = key
        if kind == "verify":
            return self._interpolate(size)
        return draft_cost(size, self.num_layers, self.head_share, self.vocab_share)

    def _blend(self, key: CostKey, prior: float) -> float:
        """The measured cost; with few samples, averaged with the prior if the prior is lower."""
        measured, count = self._medians.get(key), len(self._samples.get(key, ()))
        if measured is None:
            return prior
        if count >= TRUSTED_SAMPLES:
            return measured
        return (measured * count + min(prior, measured)) / (count + 1)

    def _interpolate(self, width: int) -> float:
        """Interpolate, or extrapolate, the cost of a width from the measured ones."""
        known = [(1, 1.0)]
        for other in sorted(other for kind, other in self._medians if kind == "verify" and other != width):
            known.append((other, self._blend(("verify", other), 1.0 + self.slope * (other - 1))))
        below = [point for point in known if point[0] <= width][-1]
        above = next((point for point in known if point[0] > width), None)
        if above is None:
            return below[1] + self.slope * (width - below[0])
        share = (width - below[0]) / (above[0] - below[0])
        return below[1] + share * (above[1] - below[1])


def step_width(num_tokens: int, widths: Sequence[int]) -> int:
    """The smallest of `widths`, the available widths of verify passes, that holds `num_tokens` tokens."""
    return next(width for width in widths if width >= num_tokens)


Key = tuple[str, int]  # a source, and the rank of a token among those that it offers at one place


class AcceptanceTable:
    """Running estimates of the probability that a token is accepted, by source and rank.

    A key's prior always counts as `weight` observations. Each new observation multiplies the weight of earlier ones by
    `decay`. Where a source gives its tokens probabilities of its own, the table learns by which factor these are wrong.
    """

    def __init__(self, priors: dict[Key, float], weight: float = 4.0, decay: float = 0.99) -> None:
        self._priors, self._weight, self._decay = priors, weight, decay
        # Of each key: tokens that were right, tokens, and the sum of the probabilities that the source gave them.
        self._counts = {key: [0.0, 0.0, 0.0] for key in priors}

    def record(self, key: Key, is_right: bool, score: float | None = None) -> None:
        """Add a token that was offered, and whether the base model chose it; `score` is the source's probability."""
        decay, counts = self._decay, self._counts[key]
        counts[0] = decay * counts[0] + is_right
        counts[1] = decay * counts[1] + 1.0
        counts[2] = decay * counts[2] + (self._priors[key] if score is None else score)

    def forget(self, source: str, share: float) -> None:
        """Multiply the weight of a source's observations by `share`."""
        for key, counts in self._counts.items():
            if key[0] == source:
                counts[:] = [share * count for count in counts]

    def probability(self, key: Key, score: float | None = None) -> float:
        """Probability that the next token of this key is accepted, to which its source gave the probability `score`."""
        hits, trials, scores = self._counts[key]
        before = self._priors[key] * self._weight
        if score is None:
            return (before + hits) / (self._weight + trials)
        return min(MOST_SURE, score * (before + hits) / (before + scores))


def expected_tokens(acceptance: float, num_drafts: int) -> float:
    """Expected tokens of a round: 1 + a + a^2 + ... + a^k, the bonus token included (Leviathan et al. 2022)."""
    if acceptance >= 1.0:
        return float(num_drafts + 1)
    return (1.0 - acceptance ** (num_drafts + 1)) / (1.0 - acceptance)


@dataclass(frozen=True)
class Plan:
    """How wide a round's pass is to be, and its expected tokens, of all rows, per millisecond."""

    width: int = 1
    rate: float = 0.0


class Prices:
    """What the parts of one round cost, in milliseconds, looked up once."""

    def __init__(self, costs: CostTable) -> None:
        self._costs, self.widest = costs, costs.widest_to_try
        self._verify: dict[int, float] = {}
        self._draft: dict[int, float] = {}

    def verify(self, width: int) -> float:
        """A pass over `width` tokens, and the time of such a round outside its passes."""
        if width not in self._verify:
            self._verify[width] = self._costs.verify(width) + self._costs.rest(width > 1)
        return self._verify[width]

    def draft(self, exit_layer: int) -> float:
        """As `CostTable.draft`."""
        if exit_layer not in self._draft:
            self._draft[exit_layer] = self._costs.draft(exit_layer)
        return self._draft[exit_layer]


def best_plan(promises: Sequence[Callable[[int], Sequence[float]]], prices: Prices, drafted_ms: float = 0.0) -> Plan:
    """The width of pass that gives the most tokens per millisecond, after draft steps of `drafted_ms`.

    A row's `promises`, called with a number of nodes, are the probabilities that each of its best nodes is accepted, in
    descending order: fewer if there are no more. A pass over them costs what its widest row costs.
    """
    rows, best = len(promises), Plan(1, len(promises) / (drafted_ms + prices.verify(1)))
    lengths = [length for length in DRAFT_LENGTHS if length < prices.widest]
    for place, length in enumerate(lengths):
        nodes = [promised(length)[:length] for promised in promises]
        tokens, longest = rows + sum(map(sum, nodes)), max(map(len, nodes))
        if longest == 0:
            break
        rate = tokens / (drafted_ms + prices.verify(longest + 1))
        if rate > best.rate:
            best = Plan(longest + 1, rate)
        if longest < length:
            break
        last = sum(row[-1] for row in nodes if len(row) == length)  # each further node promises no more
        if all(
            tokens + (other - length) * last <= best.rate * (drafted_ms + prices.verify(other + 1))
            for other in lengths[place + 1 :]
        ):
            break
    return best


def best_rate(promises: Sequence[Sequence[float]], prices: Prices, drafted_ms: float) -> float:
    """The rate of [`best_plan`] where all that rows promise is known."""
    rows, longest = len(promises), max(map(len, promises))
    sums = [list(accumulate(row, initial=0.0)) for row in promises]
    lengths = [length for length in DRAFT_LENGTHS if length < prices.widest and length < longest]
    if longest and longest < prices.widest:
        lengths.append(min(longest, MAX_DRAFT))
    rates = [
        (rows + sum(row[min(length, len(row) - 1)] for row in sums)) / (drafted_ms + prices.verify(length + 1))
        for length in lengths
    ]
    return max([rows / (drafted_ms + prices.verify(1)), *rates])


def step_gains(
    promises: Sequence[Sequence[float]], reaches: Sequence[float], rates: Sequence[float], num_steps: int
) -> list[list[float]]:
    """What rows would promise after `num_steps` more draft steps, for [`best_rate`].

    Args:
        promises: What each row promises without them.
        reaches: Of each row, the probability that the first step's place is reached and no known node there is right.
        rates: Probability that the base model takes each of a step's tokens, by rank.
        num_steps: Steps, of which each drafts after the best token of the one before.
    """
    found = []
    for known, reach in zip(promises, reaches, strict=True):
        new = [reach * rates[0] ** step * rate for step in range(num_steps) for rate in rates]
        found.append(sorted([*known, *new], reverse=True))
    return found
