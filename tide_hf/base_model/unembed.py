"""Map hidden states before the final norm to logits, exactly as the base model does."""

from __future__ import annotations

import hashlib
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_in_torch_dispatch_mode, is_traceable_wrapper_subclass
from transformers import PreTrainedModel

from ..common.memory import copy_if_it_fits
from ..kernels.cpu.cpp_kernels import are_ready, load_op
from ..kernels.ops import WITHOUT_KERNELS, Ops
from ..kernels.reference import which_norm
from .inputs import takes_media
from .structure import DecoderStructure

HASH_ROWS = 256
SAMPLED_WEIGHTS = 16  # approximate number of values of each tensor that enter a hash
# Multimodal models that apply the text config's logit scaling; others leave the logits unscaled.
SCALING_MULTIMODAL = frozenset(
    {"gemma3n", "gemma4", "gemma4_unified", "granite4_vision", "granite_docling", "paligemma"}
)


class Unembed:
    """The base model's final norm, projection, head, and scaling or softcapping of logits."""

    def __init__(self, model: PreTrainedModel, structure: DecoderStructure, ops: Ops = WITHOUT_KERNELS) -> None:
        config = model.config.get_text_config()
        if takes_media(model) and model.config.model_type not in SCALING_MULTIMODAL:
            config = None
        self.structure = structure
        self.ops = ops
        self._norms: dict[torch.dtype, tuple[str, float] | None] = {}  # the norm's kernel name and eps, by dtype
        self.divisor = getattr(config, "logits_scaling", None)  # granite
        self.factor = getattr(config, "logit_scale", None)  # cohere
        self.softcap = getattr(config, "final_logit_softcapping", None)  # gemma
        self.softcap = self.softcap or getattr(config, "logits_soft_cap", None)  # recurrent_gemma

    def normalize(self, hidden_states: Tensor) -> Tensor:
        """Apply the final norm to hidden states of any layer."""
        norm = self.structure.norm
        return hidden_states if norm is None else norm(hidden_states)

    def head_input(self, hidden_states: Tensor) -> Tensor:
        """Apply the final norm, and the projection of OPT."""
        state, projection = self.normalize(hidden_states), self.structure.projection
        return state if projection is None else projection(state)

    def route(self, router: Any, hidden_states: Tensor) -> Tensor:
        """Apply the final norm and an `ExitRouter` to hidden states (..., D); return scores (...) in float32."""
        norm: Any = self.structure.norm
        weight, bias = getattr(norm, "weight", None), getattr(norm, "bias", None)
        down, up = router.down, router.up
        fused = self.ops.run_on(hidden_states, weight, bias, down.weight, up.weight) and weight is not None
        if fused and hidden_states.dtype not in self._norms:
            self._norms[hidden_states.dtype] = which_norm(norm, hidden_states)
        found = self._norms[hidden_states.dtype] if fused else None
        if found is None:
            return router(self.normalize(hidden_states).to(down.weight.device))  # the norm may be on another device
        rows, (name, eps) = hidden_states.reshape(-1, hidden_states.shape[-1]), found
        weights = (weight, bias, down.weight, down.bias, up.weight, up.bias)
        return self.ops.norm_route(rows, *weights, eps=eps, norm=name).view(hidden_states.shape[:-1])

    def __call__(self, hidden_states: Tensor) -> Tensor:
        """Map hidden states (..., D) before the final norm to logits (..., V), both in the model's dtype."""
        logits = self.structure.head(self.head_input(hidden_states))
        if self.divisor is not None:
            logits = logits / self.divisor
        if self.factor is not None:
            logits = logits * self.factor
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits


class DraftUnembed:
    """Maps hidden states to top-1 tokens of the draft vocabulary `token_ids`, (draft_vocab_size,), or of all tokens.

    Scaling and softcapping are left out, since they keep the order of the logits.
    """

    def __init__(self, unembed: Unembed, token_ids: Tensor | None = None) -> None:
        self.unembed, head = unembed, unembed.structure.head
        rows = None
        if token_ids is not None:
            weight: Any = head.weight
            num_bytes = len(token_ids) * weight.shape[-1] * weight.element_size() if weight.is_cpu else 0
            rows = copy_if_it_fits(partial(_rows_of, head, token_ids), num_bytes)
        self.token_ids, self.head = (None, head) if rows is None else (token_ids, rows)
        self._source = self._find_source()

    def is_current(self) -> bool:
        """Whether the copied rows still match the head. Writes through `.data` are not detected."""
        return self._find_source() == self._source

    def __call__(self, hidden_states: Tensor) -> Tensor:
        """Map hidden states (..., D) before the final norm to their top-1 tokens (...)."""
        state = self._state(hidden_states)
        top = self._fused(state) if self._is_fused(state) else greedy_tokens(self.head(state))
        return top if self.token_ids is None else self.token_ids.to(top.device)[top]

    def _find_source(self) -> tuple[tuple[int, ...], ...] | None:
        """Identity and version of the head's current weights; `None` if no rows were copied."""
        if self.token_ids is None:
            return None
        head: Any = self.unembed.structure.head
        parts = [part for part in (head.weight, getattr(head, "bias", None)) if part is not None]
        return tuple((id(part), *addresses_of(part), 0 if part.is_inference() else part._version) for part in parts)

    def _state(self, hidden_states: Tensor) -> Tensor:
        state = self.unembed.head_input(hidden_states)
        # Accelerate's hooks move inputs to the head's device; the copy of its rows has no hooks.
        return state if self.token_ids is None else state.to(next(self.head.parameters()).device)

    def _is_fused(self, state: Tensor) -> bool:
        head: Any = self.head
        is_plain = type(head) is nn.Linear and is_plain_linear(head) and state.dtype == head.weight.dtype
        return is_plain and self.unembed.ops.run_on(state, head.weight, head.bias)

    def _fused(self, state: Tensor) -> Tensor:
        head: Any = self.head
        top, _ = self.unembed.ops.draft_top1(state.reshape(-1, state.shape[-1]), head.weight, head.bias)
        return top.view(state.shape[:-1])


def greedy_tokens(logits: Tensor) -> Tensor:
    """Return the argmax (...) of logits (..., V). `torch.argmax` is six times slower in bfloat16 on CPUs."""
    op = _top_op(logits, 1, in_graph=True)
    return logits.max(dim=-1).indices if op is None else op(logits, 1, False)[1][..., 0]


def _top_op(logits: Tensor, count: int, in_graph: bool = False) -> Any:
    """The kernel that finds the largest logits; `None` where it cannot run, or in a graph unless that is `in_graph`."""
    is_known = type(logits) is Tensor and not is_in_torch_dispatch_mode()
    suits = logits.is_cpu and (is_known or in_graph) and not torch.compiler.is_compiling()
    suits = suits and not logits.requires_grad and 0 < count <= min(MOST_TOP, logits.shape[-1])
    return load_op("top_tokens", logits.dtype) if suits and are_ready(logits.dtype) else None


MOST_TOP = 16  # tokens that the kernel finds
TOP_BLOCK = 64  # logits, of which `top_tokens` first finds the largest


def top_tokens(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest logits (..., count) of (..., V), in descending order, and their tokens.

    `torch.topk` takes several times as long over a whole vocabulary: only blocks with the largest maxima are sorted.
    """
    if (op := _top_op(logits, count)) is not None:
        values, tokens, _ = op(logits, count, False)
        return values.to(logits.dtype), tokens
    if count == 1:
        best = logits.max(dim=-1, keepdim=True)
        return best.values, best.indices
    blocks = logits.shape[-1] // TOP_BLOCK
    if blocks < 4 * count:
        largest = logits.topk(min(count, logits.shape[-1]), dim=-1)
        return largest.values, largest.indices
    whole = logits[..., : blocks * TOP_BLOCK].unflatten(-1, (blocks, TOP_BLOCK))
    chosen = whole.amax(dim=-1).topk(count, dim=-1).indices
    candidates = whole.gather(-2, chosen[..., None].expand(*chosen.shape, TOP_BLOCK)).flatten(-2)
    index = (chosen[..., None] * TOP_BLOCK + torch.arange(TOP_BLOCK, device=logits.device)).flatten(-2)
    rest = torch.arange(blocks * TOP_BLOCK, logits.shape[-1], device=logits.device)
    candidates = torch.cat([candidates, logits[..., blocks * TOP_BLOCK :]], dim=-1)
    index = torch.cat([index, rest.expand(*index.shape[:-1], len(rest))], dim=-1)
    found = candidates.topk(count, dim=-1)
    return found.values, index.gather(-1, found.indices)


def likeliest_tokens(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """As [`top_tokens`], with log-probabilities instead of logits."""
    if (op := _top_op(logits, count)) is not None:
        values, tokens, log_sums = op(logits, count, True)
        return values - log_sums, tokens
    best, tokens = top_tokens(logits, count)
    return best - logits.logsumexp(dim=-1, keepdim=True), tokens


def _rows_of(head: nn.Module, token_ids: Tensor) -> nn.Module:
    """A linear layer with a copy of the rows `token_ids` of `head`, dequantised."""
    weight = _dequantized(head.weight)
    bias: Any = getattr(head, "bias", None)
    index = token_ids.to(weight.device)
    rows = nn.Linear(weight.shape[1], len(token_ids), bias=bias is not None, device="meta")
    rows.weight = nn.Parameter(weight.detach()[index], requires_grad=False)
    if bias is not None:
        rows.bias = nn.Parameter(bias.detach()[index], requires_grad=False)
    return rows


def unembed_hash(head: nn.Module) -> str | None:
    """Fingerprint a head. Its dtype and weight quantisation hardly change the fingerprint.

    Each bit is the sign of one row's projection on a fixed random direction (SimHash, Charikar 2002), so close
    weights give close fingerprints and unrelated weights differ in about half of the bits.
    Returns 64 hexadecimal digits; `None` if the weight is offloaded, or packed without a `dequantize` of its own.
    """
    weight: Any = getattr(head, "weight", None)
    if weight is None or not _is_readable(weight):
        return None
    weight = _dequantized(weight)
    if _is_sharded(weight):
        weight = weight.full_tensor()
    width = weight.shape[1]
    direction = hashlib.shake_256(b"tide_hf unembed").digest((width + 7) // 8)
    signs = [1.0 if direction[i // 8] >> (i % 8) & 1 else -1.0 for i in range(width)]
    rows = torch.linspace(0, weight.shape[0] - 1, HASH_ROWS, dtype=torch.float64, device="cpu").long()
    bits = (weight.detach()[rows.to(weight.device)].float().cpu() @ torch.tensor(signs, device="cpu") > 0).tolist()
    return f"{sum(1 << position for position, bit in enumerate(bits) if bit):064x}"


def weights_hash(model: nn.Module) -> str:
    """Fingerprint a model by its weights, since models with and without an adapter share a head.

    Reads a few values of each tensor; skips weights that are offloaded, or packed without a `dequantize` of their own.
    Returns 64 hexadecimal digits.
    """
    digest = hashlib.sha256()
    for name, weight in model.named_parameters():
        if (type(weight) is nn.Parameter or _unpacks_itself(weight)) and _is_readable(weight):
            flat = _dequantized(weight).detach().reshape(-1)
            digest.update(f"{name} {flat[:: max(1, len(flat) // SAMPLED_WEIGHTS)].tolist()}".encode())
    return digest.hexdigest()


def is_plain_linear(head: nn.Module) -> bool:
    """Whether the head's weight can be read directly: neither packed, nor offloaded, nor sharded over processes."""
    weight: Any = getattr(head, "weight", None)
    return has_readable_rows(head) and not _unpacks_itself(weight)


def has_readable_rows(head: nn.Module) -> bool:
    """Whether rows of the head's weight can be copied; quantised ones too, if the weight can dequantise itself."""
    weight: Any = getattr(head, "weight", None)
    return weight is not None and _is_readable(weight) and not _is_sharded(weight)


def addresses_of(tensor: Any) -> tuple[int, ...]:
    """The address of a tensor, or those of the tensors in a subclass: integers and scales of a quantised weight.

    Subclasses that do not say what is in them have none, and are identified by `id` alone.
    """
    if type(tensor) in (Tensor, nn.Parameter):
        return (tensor.data_ptr(),)
    names = tensor.__tensor_flatten__()[0] if is_traceable_wrapper_subclass(tensor) else ()
    return tuple(address for name in names for address in addresses_of(getattr(tensor, name)))


def _is_readable(weight: Tensor) -> bool:
    """Whether a weight's values are at hand; torchao's packed int4 looks like floating point, but cannot dequantise."""
    is_packed = is_traceable_wrapper_subclass(weight) and not (_unpacks_itself(weight) or _is_sharded(weight))
    return weight.is_floating_point() and weight.device.type != "meta" and not is_packed


def _unpacks_itself(weight: Tensor) -> bool:
    """Whether the weight is a quantised tensor that reports a floating-point dtype, but can hardly be indexed."""
    return type(weight).dequantize is not Tensor.dequantize


def _dequantized(weight: Any) -> Any:
    return weight.dequantize() if _unpacks_itself(weight) else weight


def _is_sharded(weight: Tensor) -> bool:
    """Whether tensor parallelism has split the weight over processes."""
    return hasattr(weight, "full_tensor")


def hash_distance(first: str, second: str) -> float:
    """Share of differing bits: about 0.5 for unrelated heads, a few percent after quantisation, 0 for the same head."""
    return (int(first, 16) ^ int(second, 16)).bit_count() / HASH_ROWS
