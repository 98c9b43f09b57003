"""Weights as packages for quantisation have them, without a package."""

import torch
from torch import nn
from torch.nn import functional


class Quantized(torch.Tensor):
    """What torchao's `Int8Tensor` and optimum-quanto's `WeightQBytesTensor` have in common."""

    @staticmethod
    def __new__(cls, integers, scales):
        return torch.Tensor._make_wrapper_subclass(cls, integers.shape, dtype=scales.dtype)

    def __init__(self, integers, scales):
        self.qdata = self._data = integers
        self.scale = self._scale = scales
        self.axis = 0

    def dequantize(self):
        return self.qdata * self.scale

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is functional.linear:
            return function(args[0], args[1].dequantize(), *args[2:], **(kwargs or {}))
        return super().__torch_function__(function, types, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        assert function is torch.ops.aten.detach.default
        return cls(args[0].qdata, args[0].scale)


def quantized(weight, package="torchao"):
    scales = weight.detach().abs().amax(dim=1, keepdim=True) / 127
    kind = type("Quantized", (Quantized,), {"__module__": f"{package}.tensors"})
    return nn.Parameter(kind((weight.detach() / scales).round().to(torch.int8), scales), requires_grad=False)
