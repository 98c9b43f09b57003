"""Simulated machines and models, on which the real policy and drafter decode, without a clock."""

from dataclasses import dataclass

from tide_hf.speculation.drafters import HybridDrafter
from tide_hf.speculation.drafts import ROOT, Accepted, Draft
from tide_hf.speculation.policy import CostTable
from tide_hf.speculation.sources import Ngrams

NUM_LAYERS, VOCAB, PROMPT_LENGTH = 30, 5000, 40
PLAIN_MS = 10.0


@dataclass(frozen=True)
class Machine:
    """What passes cost, in plain passes, and how often the sources of drafts are right."""

    wider: float  # what a verify pass over more than one token costs beyond a plain pass
    slope: float  # what each further token costs
    draft: float  # a draft step
    noise: float  # standard deviation of a measured cost, as a share of it
    spikes: float  # share of passes that are measured to take three times as long
    head: float  # share of the head's tokens that are right
    sharpness: float  # share of the head's tokens whose score tells whether they are right
    boast: float  # factor on the odds in the head's scores
    copying: float  # share of tokens at which a copy of earlier text begins
    copied: int  # its length
    first: float = 1.0  # factor on the cost of the process's first pass of each kind
    rest: float = 0.0  # what the host does in a round besides its passes, in plain passes
    search: float = 0.0  # what it does beyond that in rounds that are not idle
    drafted_rest: float = 0.0  # what it does beyond that where there are drafts

    @classmethod
    def drawn(cls, rng):
        """Draw a machine; on some every draft gains, on others every draft loses."""
        return cls(
            wider=rng.choice([0.0, 0.05, 0.3, 1.0]) * rng.uniform(0.5, 1.5),
            slope=rng.choice([0.0, 0.02, 0.1, 0.4]) * rng.uniform(0.5, 1.5),
            draft=rng.choice([0.03, 0.1, 0.3, 0.8]) * rng.uniform(0.5, 1.5),
            noise=rng.choice([0.0, 0.03, 0.1]),
            spikes=rng.choice([0.0, 0.0, 0.03]),
            head=rng.choice([0.02, 0.2, 0.45, 0.7, 0.9]),
            sharpness=rng.choice([0.0, 0.5, 0.9]),
            boast=rng.choice([0.5, 1.0, 1.0, 3.0]),
            copying=rng.choice([0.0, 0.0, 0.03, 0.1]),
            copied=rng.choice([3, 8, 30]),
            first=rng.choice([1.0, 1.0, 1.5, 2.5]),
            rest=rng.choice([0.0, 0.1, 0.5]),
            search=rng.choice([0.0, 0.03, 0.1]),
            drafted_rest=rng.choice([0.0, 0.1, 0.3]),
        )


class _Text:
    """The tokens that the model would write, drawn as they are read."""

    def __init__(self, rng, machine):
        self.rng, self.machine, self.copied_from, self.left = rng, machine, 0, 0
        self.tokens = [rng.randrange(VOCAB) for _ in range(PROMPT_LENGTH)]

    def __getitem__(self, position):
        while len(self.tokens) <= position:
            if not self.left and self.rng.random() < self.machine.copying:
                self.left, self.copied_from = self.machine.copied, self.rng.randrange(len(self.tokens))
            if self.left:
                self.tokens.append(self.tokens[self.copied_from])
                self.left, self.copied_from = self.left - 1, self.copied_from + 1
            else:
                self.tokens.append(self.rng.randrange(VOCAB))
        return self.tokens[position]


class _Engine:
    """An engine with a draft head, for one row; `spent` is what its passes have cost, in plain passes."""

    reads_drafts, takes_trees, head_layer = True, True, 0

    def __init__(self, rng, machine, costs, seen):
        self.rng, self.machine, self.costs, self.text = rng, machine, costs, _Text(rng, machine)
        self.position, self.spent = PROMPT_LENGTH, 0.0
        self.seen, self.has_drafted = seen, False

    def _pay(self, key, cost):
        cost *= 1.0 if key in self.seen else self.machine.first
        self.seen.add(key)
        self.spent += cost
        measured = cost * max(0.5, self.rng.gauss(1.0, self.machine.noise))
        self.costs.record(key, PLAIN_MS * measured * (3.0 if self.rng.random() < self.machine.spikes else 1.0))

    def draft(self, exit_layer, drafted):
        machine, (tokens,) = self.machine, drafted
        self._pay(("draft", exit_layer), machine.draft)
        self.has_drafted = True
        is_right = self.rng.random() < machine.head
        score = machine.head
        if self.rng.random() < machine.sharpness:
            score = 0.98 if is_right else 0.02
        odds = machine.boast * score / (1 - score)
        is_right &= all(token == self.text[self.position + place] for place, token in enumerate(tokens))
        token = self.text[self.position + len(tokens)] if is_right else -1 - self.rng.randrange(VOCAB)
        return [[token]], [[odds / (1 + odds)]]

    def likeliest(self):
        return []

    def verify(self, draft):
        """Return the new tokens, those of the draft's path that is right and one more, and this path."""
        num_nodes = len(draft.nodes)
        self._pay(
            ("verify", 1 + num_nodes), 1.0 + (self.machine.wider + self.machine.slope * num_nodes) * (num_nodes > 0)
        )
        has_drafts = num_nodes > 0 or self.has_drafted
        is_search = not self.costs.is_idle
        rest = self.machine.rest + self.machine.search * is_search + self.machine.drafted_rest * has_drafts
        self.has_drafted, self.spent = False, self.spent + rest
        self.costs.record_rest(PLAIN_MS * rest, has_drafts)
        start, node, path = self.position, ROOT, []
        while (node := self._right_child(draft, node, start + len(path))) is not None:
            path.append(node)
        self.position += len(path) + 1
        return Accepted([self.text[place] for place in range(start, self.position)], path)

    def _right_child(self, draft, node, place):
        return next((child for child in draft.children(node) if draft.nodes[child].token == self.text[place]), None)


def costs_of_tokens(rng, machine, num_answers, length, change, pauses=None):
    """Let one process decode answers of `length` tokens on a machine that can become another midway in an answer.

    Args:
        change: Share of answers in which it does.
        pauses: Gets whether drafting was paused after each round; nothing may then be drafted in the next one.

    Returns:
        What each token cost, in plain rounds; the tokens of a round cost the same.
    """
    table, learned, costs, seen = CostTable(NUM_LAYERS), {}, [], set()
    prior = min(0.95, max(0.05, machine.head + rng.gauss(0.0, 0.2)))
    for _ in range(num_answers):
        other = Machine.drawn(rng) if rng.random() < change else machine
        engine = _Engine(rng, machine, table, seen)
        sources = [Ngrams([engine.text.tokens[:]])]
        drafter = HybridDrafter(sources, lambda _: table, {0: prior}, engine, learned)
        drafter.observe(0, Draft(), engine.verify(Draft()))
        left, engine.spent, paused = length, 0.0, False
        while left:
            if left <= length // 2:
                machine = engine.machine = engine.text.machine = other
            before = engine.spent
            (draft,) = drafter.draft([0], [left - 1])
            assert not (paused and draft.tokens)
            paused = table.drafting_paused and not draft.tokens
            if pauses is not None:
                pauses.append(paused)
            accepted = engine.verify(draft)
            drafter.observe(0, draft, accepted)
            num_new = len(accepted.tokens)
            costs += [(engine.spent - before) / (1.0 + machine.rest) / num_new] * num_new
            left -= num_new
    return costs
