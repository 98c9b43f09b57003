"""Forward passes that run only as deep as they have to, inside the model's own `forward`.

`gates` stand in front of decoder layers, and hold the runs that decide for them. `early_exit` has the runs in which
tokens leave where a criterion says so, `recompute` the one that runs the layers they skipped later, `block_drafting`
those of the block head (`block_memory` is what stays of them with a cache). `kv_cache` is what is done to the K/V of
skipped layers and of rejected drafts, `cache_slots` the same for batches. `wide_passes` proves that a model gives the
same logits in passes over several tokens. `linear_gate` has linear layers read their weights in another layout.
"""
