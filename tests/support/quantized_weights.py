"""Weights as packages for quantisation have them, without a package."""

import torch
from torch import nn
from torch.nn import functional

KINDS = ("rows", "groups", "zeros", "int4")  # one scale a row, or a group; with zero points; packed, of two in a byte
GROUP = 16


class Quantized(torch.Tensor):
    """What torchao's `Int8Tensor` and optimum-quanto's `WeightQBytesTensor` have in common."""

    @staticmethod
    def __new__(cls, integers, scales):
        return torch.Tensor._make_wrapper_subclass(cls, integers.shape, dtype=scales.dtype, device=integers.device)

    def __init__(self, integers, scales):
        self.qdata = self._data = integers
        self.scale = self._scale = scales
        self.axis = 0

    def __tensor_flatten__(self):
        return ["qdata", "scale", *(["zero_point"] if hasattr(self, "zero_point") else [])], None

    @classmethod
    def __tensor_unflatten__(cls, tensors, *_):
        found = cls(tensors["qdata"], tensors["scale"])
        found.__dict__.update(tensors)
        return found

    def dequantize(self):
        zero_point = getattr(self, "zero_point", torch.zeros(()))
        return scaled(self.qdata, self.scale, -(zero_point * self.scale))

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is functional.linear:
            return args[1].linear(args[0], *args[2:], **(kwargs or {}))
        return super().__torch_function__(function, types, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        assert function is torch.ops.aten.detach.default
        found = cls(args[0].qdata, args[0].scale)
        found.__dict__.update(args[0].__dict__)
        return found

    def linear(self, state, bias=None):
        return functional.linear(state, self.dequantize(), bias)


class PackedInt4(Quantized):
    """torchao's `Int4OpaqueTensor`, which cannot dequantise itself."""

    dequantize = torch.Tensor.dequantize

    @staticmethod
    def __new__(cls, packed, scales):
        size = packed.shape[0], 2 * packed.shape[1]
        return torch.Tensor._make_wrapper_subclass(cls, size, dtype=scales.dtype)

    def __init__(self, packed, scales):
        self.qdata, self.scale_and_zero = packed, scales
        self.scale = scales  # which it does not have, but `detach` above reads

    def __tensor_flatten__(self):
        return ["qdata", "scale_and_zero"], None

    @classmethod
    def __tensor_unflatten__(cls, tensors, *_):
        return cls(tensors["qdata"], tensors["scale_and_zero"])

    def linear(self, state, bias=None):
        group = 2 * self.qdata.shape[1] // len(self.scale_and_zero)
        rows = state.reshape(-1, state.shape[-1])
        found = torch.ops.aten._weight_int4pack_mm_for_cpu(rows, self.qdata, group, self.scale_and_zero)
        found = found.unflatten(0, state.shape[:-1])
        return found if bias is None else found + bias


def scaled(integers, scales, zeros):
    """Integers (out, in) times scales plus zeros, (out, groups) each or without dimensions."""
    wide = integers.unflatten(1, (scales.shape[1] if scales.dim() > 1 else 1, -1))
    zeros = zeros[..., None] if zeros.dim() > 0 else zeros
    return (wide * scales[..., None] + zeros).flatten(1)


def packed_int4(integers):
    """Integers (out, in) from -8 to 7 as PyTorch packs them on a CPU with the vectors that kernels are built for."""
    vector = 16 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 8
    blocks = (integers + 8).to(torch.uint8).unflatten(0, (-1, 2, 2, vector)).permute(0, 4, 1, 2, 3)
    return (blocks[:, :, 0] | blocks[:, :, 1] << 4).reshape(len(integers), -1)


def by_group(weight, group, levels):
    """Scales (out, groups) and smallest values of groups of a weight, for integers of as many levels."""
    groups = weight.unflatten(1, (-1, group))
    least, largest = groups.amin(dim=-1), groups.amax(dim=-1)
    return (largest - least) / (levels - 1), least


def quantize(model, kind="rows"):
    """Quantise the linear layers of a model's decoder layers."""
    for module in model.model.layers.modules():
        if isinstance(module, nn.Linear):
            module.weight = quantized(module.weight, kind=kind)
    return model


def quantized(weight, package="torchao", kind="rows"):
    weight = weight.detach()
    base = PackedInt4 if kind == "int4" else Quantized
    of_package = type("Quantized", (base,), {"__module__": f"{package}.tensors"})
    if kind in ("rows", "groups"):
        group = weight.shape[1] if kind == "rows" else GROUP
        scales = weight.unflatten(1, (-1, group)).abs().amax(dim=-1) / 127
        found = of_package((weight / scales.repeat_interleave(group, dim=1)).round().to(torch.int8), scales)
    elif kind == "zeros":
        scales, least = by_group(weight, GROUP, 256)
        zero_point = (-128 - least / scales).round().clamp(-128, 127)
        wide = [one.repeat_interleave(GROUP, dim=1) for one in (scales, zero_point)]
        found = of_package((weight / wide[0] + wide[1]).round().clamp(-128, 127).to(torch.int8), scales)
        found.zero_point = zero_point.to(torch.int8)
    else:
        group = 2 * GROUP  # the least that PyTorch's op takes
        scales, least = by_group(weight, group, 16)
        wide = [one.repeat_interleave(group, dim=1) for one in (scales, least)]
        integers = ((weight - wide[1]) / wide[0]).round().clamp(0, 15).to(torch.int32)
        pairs = torch.stack([scales.t(), (least + 8 * scales).t()], dim=-1).contiguous()
        found = of_package(torch.ops.aten._convert_weight_to_int4pack_for_cpu(integers, 1), pairs)
    return nn.Parameter(found, requires_grad=False)
