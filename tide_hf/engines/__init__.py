"""The engines that run passes: the eager engine, and the static engine on compiled steps of fixed shape.

`kinds` are the engines as users name them, with what they keep between calls, and decides which calls can run on steps.
`eager` runs the model's own forward, `static` the steps of `steps/`. `gqa_attention` is attention that does not repeat
the K/V of grouped query heads, and `warm_up` prepares steps before the first answer.
"""
