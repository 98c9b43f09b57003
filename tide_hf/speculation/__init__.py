"""The self-speculative loop and its parts: an engine, a drafter, an acceptance rule.

`loop` drafts, verifies, accepts and rolls back. `protocols` says what its parts are, `drafts` has the tree of draft
tokens that they hand on. `drafters` drafts where `policy`, given the measured costs of passes, expects a gain: trees
that `growth` grows from what `sources` offer, among them earlier answers in `answer_memory` and `successors` of tokens;
`acceptance` chooses tokens from full-depth logits, on accelerators by `device_choice` for a whole pass at once; `rows`
has the sequences and their stopping criteria. `call` checks which calls the loop can decode. `attachment` has what TIDE
adds to a model. `prefill` runs prompts in groups, and reuses the K/V of a shared prefix; `ranks` makes processes that
share a model make the same decisions.
"""
