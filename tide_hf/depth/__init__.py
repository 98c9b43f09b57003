"""Forward passes that skip decoder layers, inside the model's own `forward`.

`gates` replace the forward of decoder layers; the active run decides what each does. `early_exit` has the runs in which
tokens exit at a layer, and `recompute` the one that runs the skipped layers later, with exact K/V. `block_drafting` has
the runs of the block head, and `block_state` what a returned cache keeps for it. `kv_cache` fills the K/V of skipped
layers and rolls back rejected drafts, `cache_slots` does so per row of a batch. `multi_token_passes` checks that verify
passes give the logits of token-by-token decoding. `linear_gate` lets linear layers read their weights in other layouts.
"""
