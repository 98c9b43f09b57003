"""The base model: where its parts are, how its logits are computed, and which inputs it takes.

`structure` finds decoder layers, final norm and head, and the lengths at which positions or attention change; `unembed`
maps hidden states to logits; `parity` checks both on a probe. `inputs` lists the inputs that only prefill needs
(images, token types), `wrappers` handles PEFT and `torch.compile`, and `hooks` reads the outputs of decoder layers.
"""
