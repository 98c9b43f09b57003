"""The engines that run forward passes: the eager engine, and the static engine, which runs steps of fixed shape.

`kinds` maps the names that users pass to engines, keeps their state between calls, and decides which calls can run on
steps. `eager` runs the model's own forward, `static` the steps of `steps/`; `exit_passes` are the latter's passes in
`early_exit` with exit layers. `gqa_attention` is attention that does not repeat the K/V of grouped query heads, and
`warm_up` prepares steps before the first answer.
"""
