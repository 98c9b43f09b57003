"""Forward passes that run only as deep as they have to, inside the model's own `forward`.

`skipping` holds the gates in front of decoder layers, and the runs that decide for them. `early_exit` holds the runs in
which tokens leave where a criterion says so, `recompute` the one that runs the layers they skipped later,
`block_drafting` those of the block head (`block_memory` is what stays of them with a cache), `kv_cache` what is done
to K/V of layers that did not run, and of drafts that were wrong, `cache_slots` that for batches. `wide_passes` proves
that a model gives the same logits in passes over several tokens, and knows where one does not.
"""
