"""How a call is decoded in each mode; `generation` chooses.

`self_speculative` composes the speculative loop, or leaves a call to transformers' own loop. `early_exit` has
`post_hoc` as well: tokens exit at exit layers, on compiled steps or layer by layer. `plain_loop` counts what
transformers' loop has decoded.
"""
