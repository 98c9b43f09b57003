"""A count of the K/V heads that attention reads."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

KERNEL = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


class KeyHeads(TorchDispatchMode):
    """Notes how many heads of K attention under a mask is given."""

    def __init__(self):
        super().__init__()
        self.found = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        is_masked = func.overloadpacket is KERNEL and kwargs.get("attn_mask") is not None
        if is_masked or func.name().startswith(("tide_hf::attend_filled", "tide_hf::decode_attention")):
            self.found.add(args[1].shape[1])
        return func(*args, **(kwargs or {}))
