"""The base model: where its parts are, how its logits are computed, and which inputs it takes.

`structure` finds the decoder layers, the final norm and the head, and the lengths at which a model changes; `unembed`
maps hidden states to logits, and `parity` checks both on a probe. `inputs` knows which inputs belong to prefill alone
(images, token types), `wrappers` handles PEFT and `torch.compile`, and `hooks` watches what decoder layers return.
"""
