"""Forward passes that skip decoder layers, inside the model's own `forward`.

`gates` replaces the `forward` of decoder layers; the active `LayerRun` decides whether each layer runs. `early_exit`
has the runs in which tokens exit early, `head_drafting` the runs with a draft head, and `taps` those that collect what
a head reads. `kv_cache` fills the K/V of skipped layers and rolls back rejected drafts, per row of a batch, and `masks`
has the masks of trees of drafts.
`multi_token_passes` checks that verify passes give the logits of token-by-token decoding.
"""
