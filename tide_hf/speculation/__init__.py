"""The self-speculative loop and what it is composed of: an engine, a drafter, an acceptance rule.

`loop` drafts, verifies, accepts and rolls back. `engine` is the seam to what runs passes; `drafters` (with `ngrams`)
make drafts where `policy` says that they pay, by the measured `costs` of passes; `acceptance` takes tokens from
full-depth logits; `rows` says what ends a sequence. `requirements` says which calls it can have. `attachment` is what a
model carries from call to call. `prompt_groups` reads the prompts of a batch, whose beginning `prefix_cache` may have;
`ranks` has processes that share a model decide alike.
"""
