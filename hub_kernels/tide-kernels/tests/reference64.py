"""The ops in float64; `rounded` marks where a model rounds to its dtype."""

import torch

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
NORMS = ("rms", "rms_float32", "rms_one_plus", "layer")
SIZES = (1, 3, 127, 1025)


def rounded(x, dtype):
    return x.to(dtype).double()


def normalize(x, weight, bias, eps, norm):
    dtype, x, weight_64 = x.dtype, x.double(), weight.double()
    if norm == "layer":
        x = x - x.mean(-1, keepdim=True)
    y = x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt()
    if norm == "rms":
        return rounded(rounded(y, dtype) * weight_64, torch.promote_types(dtype, weight.dtype))
    if norm == "rms_one_plus":
        return rounded(y * (1 + weight_64), dtype)
    return rounded(y * weight_64 + (bias.double() if bias is not None else 0), dtype)


def norm_route(x, norm_weight, norm_bias, down_weight, down_bias, up_weight, up_bias, eps, norm):
    state = normalize(x, norm_weight, norm_bias, eps, norm)
    state = state @ down_weight.double().T + (down_bias.double() if down_bias is not None else 0)
    state = state * torch.sigmoid(state)
    logit = state @ up_weight.double().flatten() + (up_bias.double() if up_bias is not None else 0)
    return torch.sigmoid(logit)


def draft_top1(x, head_weight, head_bias=None):
    logits = x.double() @ head_weight.double().T + (head_bias.double() if head_bias is not None else 0)
    return logits, logits.log_softmax(-1)


def strided(tensor):
    """The same values with gaps between them, in every dimension, and the first two dimensions swapped in memory."""
    for dim in range(tensor.dim()):
        tensor = torch.stack([tensor, torch.full_like(tensor, -1)], dim=dim + 1).flatten(dim, dim + 1)
    tensor = tensor.transpose(0, 1).contiguous().transpose(0, 1) if tensor.dim() > 1 else tensor
    return tensor[tuple(slice(None, None, 2) for _ in range(tensor.dim()))]


def norm_route_arguments(dtype, num_rows, size, rank=7, norm="rms", norm_dtype=None, device="cpu"):
    generator = torch.Generator().manual_seed(size)

    def random(*shape):
        return torch.randn(*shape, generator=generator)

    hidden_states = (random(num_rows, size) * 3 + 1).to(device, dtype)
    norm_weight = (random(size) * 0.5 + 1).to(device, norm_dtype or dtype)
    norm_bias = random(size).to(device, norm_dtype or dtype) if norm == "layer" else None
    router = [random(rank, size) / size**0.5, random(rank) * 0.1, random(1, rank), random(1) * 0.1]
    return [hidden_states, norm_weight, norm_bias, *(tensor.to(device) for tensor in router)]
