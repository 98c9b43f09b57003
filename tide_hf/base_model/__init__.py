"""A base model: where its parts are, how its logits are made, and what it is given.

`structure` finds the decoder layers, the final norm and the head; `unembed` turns hidden states into logits, and
`parity` proves that it does. `inputs` knows what belongs to a prompt alone (images, token types), `adapters` what PEFT
adds, and `compilation` what `torch.compile` has taken in.
"""
