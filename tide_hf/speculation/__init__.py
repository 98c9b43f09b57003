"""The self-speculative loop and what it is composed of: an engine, a drafter, an acceptance rule.

`loop` drafts, verifies, accepts and rolls back. `engine` has the protocols of what runs passes and of what drafts;
`drafters` draft where `policy` finds that it pays, by measured costs of passes; `acceptance` chooses tokens from
full-depth logits; `rows` has the sequences and what ends them. `call` says which calls it can decode. `attachment` is
what a model carries from call to call. `prefill` runs prompts in groups, and reuses the K/V of a shared prefix; `ranks`
makes processes that share a model decide alike.
"""
