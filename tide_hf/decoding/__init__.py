"""The self-speculative loop and what it is made of: drafts, a policy that knows what they cost, rows, roll back.

`attachment` is what a model carries from call to call. `speculation` is the loop: `prompt_groups` reads prompts, whose
beginning `prefix_cache` may have; `drafting` (with `ngrams`, and `shallow` for the heads) makes drafts where `policy`
says that they pay, by the measured `costs` of passes; `choosing` takes tokens from full-depth logits; `rows` says what
ends a sequence; `ranks` has processes that share a model decide alike.
`..engines` has the loop on steps of fixed shape.
"""
