"""The engines that run forward passes: the eager engine, and the static engine, which runs steps of fixed shape.

`kinds` maps the names that users pass to engines, keeps their state between calls, and decides which calls can run on
steps. `eager` runs the model's own forward, or by `direct_passes` the parts of the model alone. `static` runs the steps
of `steps/`, after `static_prefill`; its parts are `step_rows`, `running_ahead` and `exit_passes`, its passes in
`early_exit`. `round_clock` times the passes of both.
`gqa_attention` is attention that does not repeat the K/V of grouped query heads, and `warm_up` prepares steps before
the first answer.
"""
