"""The self-speculative loop and its parts: an engine, a drafter, an acceptance rule.

`loop` drafts, verifies, accepts and rolls back. `engine` has the protocols of engines and drafters; `drafters` draft
where `policy` expects a gain from the measured costs of passes; `acceptance` chooses tokens from full-depth logits;
`rows` has the sequences and their stopping criteria. `call` checks which calls the loop can decode. `attachment` is
what a model carries from call to call. `prefill` runs prompts in groups, and reuses the K/V of a shared prefix; `ranks`
makes processes that share a model take the same decisions.
"""
