"""Decoder layers of Llama's kind as a C++ kernel, for passes over few tokens on a CPU.

In such a pass a small model's layer spends as long on starting some forty operations as on its products. One call of
the kernel runs any number of layers, one after the other. Weights are read as the gates have them: plain, in panels, or
quantised to integers.

A layer is of this kind if its modules have the names and types of Llama's, and if the kernels give the same as the
layer's own forward on random states, in a probe. The kernels run passes of up to as many tokens as they were measured
to be faster for.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks
from transformers import DynamicCache

from ..base_model.structure import CACHE, DecoderStructure, has_windows
from ..common.errors import first_line
from ..common.measurements import measured
from ..common.timing import least_seconds
from ..depth.gates import Gate, LayerRun, active, input_state
from ..kernels.cpu.cpp_kernels import are_ready, load_op
from .layouts import DECODE_ROWS, PlainWeight, StoredWeight, WeightLayout, sum_alike
from .linear_gate import KERNEL_LAYOUTS, LOSSLESS_LAYOUTS, IntegerGate, LinearGate, allowed_layouts, layouts_now
from .upcast import HALF, UpcastGate, upcasts

NORMS = ("input_layernorm", "post_attention_layernorm")
ATTENTION, MLP = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")
HEAD_NORMS = ("q_norm", "k_norm")
MASKED_BY_BOOL, MASKED_BY_SUM = ("sdpa", "tide_gqa"), ("eager",)  # attention implementations of transformers
TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 1e-1}  # of the largest value
CACHED_TOKENS, PROBED_WIDTH = 64, 3  # numbers of tokens before a probe, and in it
MEASURED_WIDTHS = (*DECODE_ROWS, 64, 128, 512, 1024)  # up to usual prompts; with more tokens, attention takes longer
REPEATS = 3

logger = logging.getLogger(__name__)


class Product(NamedTuple):
    """A linear layer as the kernel reads it."""

    weight: Tensor  # (out, in), or as in `StoredWeight`
    scales: Tensor  # as there
    bias: Tensor | None  # (out,)
    size_out: int
    is_stored: bool = False  # as a `StoredWeight`


class Norm(NamedTuple):
    """An RMSNorm: its weight (size,) and epsilon."""

    weight: Tensor
    eps: float


class FusedLayer:
    """A layer as the kernel reads it.

    Args:
        products: The linear layers, in the order q, k, v, o, gate, up, down.
        norms: The RMSNorms before attention and before the MLP.
        head_norms: The RMSNorms of the query heads and of the key heads; empty for models without.
        head_size: Values per head.
        scale: Factor of the attention scores.
    """

    def __init__(
        self, products: list[Product], norms: list[Norm], head_norms: list[Norm], head_size: int, scale: float
    ) -> None:
        self.dtype, self.size, self.head_size = norms[0].weight.dtype, norms[0].weight.numel(), head_size
        self.weights, self.scales = ([product[i] for product in products] for i in range(2))
        none = norms[0].weight.new_empty(0)
        biases = [none if product.bias is None else product.bias for product in products[:4]]
        self.biases = biases if any(bias.numel() for bias in biases) else []
        self.norms, self.head_norms = [norm.weight for norm in norms], [norm.weight for norm in head_norms]
        self.settings = (norms[0].eps, norms[1].eps, head_norms[0].eps if head_norms else 0.0, scale)
        self.kv_heads = products[1].size_out // head_size
        shapes = tuple((*weight.shape, weight.dtype, *scales.shape) for weight, scales, *_ in products)
        self.kind = self.dtype, shapes, head_size
        sizes = [product.size_out for product in products]
        self._alike = (self.settings, self.head_size, sizes, bool(self.biases), bool(self.head_norms))

    def is_like(self, other: FusedLayer) -> bool:
        """Whether one call of the kernel can run both layers."""
        return self.dtype is other.dtype and self._alike == other._alike

    def arguments_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
        """State, cosines, sines and mask among a layer's arguments; `None` if the kernels do not take them."""
        state, angles, mask = input_state(args, kwargs), kwargs.get("position_embeddings"), kwargs.get("attention_mask")
        if angles is None or state.dtype is not self.dtype or not state.is_cpu or torch.is_grad_enabled():
            return None
        for one in angles:  # those of images have four dimensions; those of partly rotated heads are shorter
            if one.dim() != 3 or one.shape[-1] != self.head_size or one.dtype is not self.dtype:
                return None
        if mask is not None and (mask.dim() != 4 or mask.shape[1] != 1 or mask.dtype not in (torch.bool, self.dtype)):
            return None
        return state, *angles, mask


class FusedStack:
    """Layers that one call of the kernel runs, one after the other."""

    def __init__(self, layers: Sequence[FusedLayer]) -> None:
        self.layers = list(layers)
        lists = ("weights", "scales", "norms", "biases", "head_norms")
        tensors = [[tensor for layer in layers for tensor in getattr(layer, name)] for name in lists]
        self._rest: list[Any] = [*tensors, *layers[0].settings]
        self._kernel: Any = load_op("decoder_layers", layers[0].dtype)

    def __call__(
        self,
        keys: list[Tensor],
        values: list[Tensor],
        state: Tensor,
        cos: Tensor,
        sin: Tensor,
        mask: Tensor | None,
        end: Tensor,
        beside: Sequence[Tensor] = (),
        tapped: Tensor | None = None,
        taps: Sequence[int] = (),
    ) -> Tensor:
        """Run the layers on hidden states `state` (rows, width, D); return their output, of the same shape.

        Args, besides `state`:
            keys, values: Of each layer, (rows, KV heads, slots, head_size), which the pass's K/V are stored in.
            cos, sin: Of the rotary embedding, (rows or 1, width, head_size).
            mask: (rows or 1, 1, width, slots), bool or added to the scores; without it, attention is causal.
            end: () int64, number of slots that are filled once this pass's K/V are stored.
            beside: Nothing; or, for a single layer, values (rows, width, D) that attention reads before the states, and
                the weight (D,) of their RMSNorm.
            tapped: (rows, width, number of taps, D), which gets the states after as many layers as `taps` says.
        """
        found: Tensor = self._kernel(
            state, cos, sin, mask, end, keys, values, *self._rest, list(beside), tapped, list(taps)
        )
        return found


def fused_layer(layer: nn.Module) -> FusedLayer | None:
    """A layer as the kernels read it; `None` if its parts are not those of Llama's kind, or the kernels are not ready.

    The kernels bypass the modules inside, so a hook, an adapter or a replaced forward among them gives `None` as well.
    """
    attention, mlp = getattr(layer, "self_attn", None), getattr(layer, "mlp", None)
    if _names(layer) != {"self_attn", "mlp", *NORMS} or attention is None or _names(mlp) != {*MLP, "act_fn"}:
        return None
    head_norm_names = HEAD_NORMS if set(HEAD_NORMS) <= _names(attention) else ()
    if _names(attention) != {*ATTENTION, *head_norm_names}:
        return None
    if layer.training or not all(map(is_untouched, layer.modules())):
        return None
    parts = [*(getattr(layer, name) for name in NORMS), *(getattr(attention, name) for name in head_norm_names)]
    norms = [norm for part in parts if (norm := norm_of(part)) is not None]
    if len(norms) < len(parts) or not are_ready(norms[0].weight.dtype):
        return None
    linears = [*(getattr(attention, name) for name in ATTENTION), *(getattr(mlp, name) for name in MLP)]
    products = [product for linear in linears if (product := product_of(linear)) is not None]
    head_size, scale = getattr(attention, "head_dim", None), getattr(attention, "scaling", None)
    is_readable = len(products) == len(linears) and agree(products, norms[0].weight.dtype)
    if not is_readable or type(head_size) is not int or type(scale) is not float:
        return None
    return FusedLayer(products, norms[: len(NORMS)], norms[len(NORMS) :], head_size, scale)


def _names(module: Any) -> set[str]:
    """The names of a module's children."""
    return {name for name, child in module._modules.items() if child is not None} if module is not None else set()


def agree(products: list[Product], dtype: torch.dtype) -> bool:
    """Whether products have dtypes and biases that one call of a kernel takes."""
    readable = (dtype, *HALF) if dtype is torch.float32 else (dtype,)
    are_readable = all(product.is_stored or product.weight.dtype in readable for product in products)
    return are_readable and all(product.bias is None for product in products[4:])


def is_untouched(module: nn.Module) -> bool:
    """Whether nothing but this library's gates acts on a module."""
    forward = module.__dict__.get("forward")
    is_own = forward is None or (isinstance(forward, Gate) and forward.replaced is None)
    return is_own and not (module._forward_hooks or module._forward_pre_hooks or _has_global_hooks())


def product_of(linear: nn.Module, layout: type[WeightLayout] | None = None) -> Product | None:
    """A linear layer whose weight has a gate; `None` if the kernels cannot read it.

    Its weight is read in the fastest of the layouts allowed now that hold the same values, as the model's passes read
    it; or, of layers of TIDE's own, in `layout`, and in their own dtype.
    """
    gate = linear.__dict__.get("forward")
    if not isinstance(gate, LinearGate) or not gate.sources():
        return None
    bias = linear._parameters.get("bias")
    if layout is not None:
        stored = gate.convert(layout)
    else:
        bias = gate.upcast.float32("bias") if bias is not None and upcasts() else bias
        lossless = tuple(one for one in layouts_now() if one in LOSSLESS_LAYOUTS)
        stored = gate.prepare(DECODE_ROWS[0], (*lossless, PlainWeight), torch.float32 if upcasts() else None)
    size_out: Any = linear.out_features
    if isinstance(stored, StoredWeight) and not stored.padding:
        return Product(stored.values, stored.scales, bias, size_out, is_stored=True)
    if isinstance(gate, IntegerGate):
        return None
    plain: Any = gate.convert(PlainWeight)  # a copy of weights that are not contiguous
    return Product(plain.plain[0], torch.empty(0), bias, size_out) if plain is not None else None


def norm_of(norm: nn.Module) -> Norm | None:
    """An RMSNorm with a weight and nothing else; `None` for other norms."""
    weight, eps = norm._parameters.get("weight"), getattr(norm, "variance_epsilon", None)
    is_known = type(norm).__name__.endswith("RMSNorm") and len(norm._parameters) == 1
    if not (is_known and type(weight) is nn.Parameter and type(eps) is float):
        return None
    gate = norm.__dict__.get("forward")
    return Norm(gate.float32("weight") if upcasts() and isinstance(gate, UpcastGate) else weight, eps)


class FusedLayers:
    """The layers of one model that kernels can run, as far as probes have shown it."""

    def __init__(self, structure: DecoderStructure) -> None:
        self.structure = structure
        self._equal: dict[tuple[Any, ...], bool] = {}  # by layer and its settings, whether the kernels give its results
        self._most_tokens: dict[tuple[Any, ...], int] = {}  # up to which the kernels are faster, by shapes and threads
        # Whether a pass has shown that each layer gets the output of the one before, and all the same angles and mask.
        self.are_chain = False
        # What the layers were last found from, and those found: to find them again takes as long as half a pass.
        self._last: tuple[Any, dict[int, tuple[FusedLayer, int]]] | None = None

    def forget(self) -> None:
        """Free the layers, with their converted weights; they are found again in the next call."""
        self._last = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave the layers out of copies and pickles."""
        return {**self.__dict__, "_last": None}

    @property
    def may_join(self) -> bool:
        """Whether all layers attend to the same tokens, and the model calls all of them."""
        config = getattr(getattr(self.structure.layers[0], "self_attn", None), "config", None)  # all share it
        return not has_windows(config) and getattr(config, "num_hidden_layers", None) == self.structure.num_layers

    def note_chain(self) -> None:
        """See `are_chain`."""
        self.are_chain = True

    def for_tokens(self, tokens: int) -> dict[int, FusedLayer]:
        """The layers, by index, that the kernels run in passes over a number of tokens."""
        is_any = sum_alike(layouts_now())
        return {idx: fused for idx, (fused, limit) in self.with_limits().items() if is_any or tokens <= limit}

    def with_limits(self, num_layers: int | None = None) -> dict[int, tuple[FusedLayer, int]]:
        """The layers that the kernel runs, by index, and up to how many tokens; with `num_layers`, of the first ones.

        Weights are read in the layouts allowed now, and must not be replaced while the result is used.
        """
        if self._last is not None and self._last[0] == self._facts(num_layers):
            return self._last[1]
        found = {}
        for layer_idx, layer in enumerate(self.structure.layers[:num_layers]):
            fused = fused_layer(layer)
            if fused is not None and (limit := self._limit_of(layer_idx, layer, fused)) > 0:
                found[layer_idx] = fused, limit
        self._last = self._facts(num_layers), found  # with the weights that have been converted meanwhile
        return found

    def _facts(self, num_layers: int | None) -> tuple[Any, ...]:
        """All that `with_limits` depends on."""
        common = num_layers, layouts_now(), upcasts(), torch.get_num_threads(), _has_global_hooks()
        return *common, [(_settings(layer), *_facts_of(layer)) for layer in self.structure.layers[:num_layers]]

    def _limit_of(self, layer_idx: int, layer: nn.Module, fused: FusedLayer) -> int:
        """The largest number of tokens for which the kernels run a layer; 0 if they do not."""
        key, kind = (layer_idx, id(layer), fused.dtype, _settings(layer)), (torch.get_num_threads(), fused.kind)
        if key not in self._equal:
            self._equal[key] = Probe(self.structure, layer_idx, layer, fused).is_equal()
        if self._equal[key] and kind not in self._most_tokens:
            self._most_tokens[kind] = Probe(self.structure, layer_idx, layer, fused).most_tokens()
        return self._most_tokens[kind] if self._equal[key] else 0


def _has_global_hooks() -> bool:
    return bool(_global_forward_hooks or _global_forward_pre_hooks)


def _facts_of(module: nn.Module) -> list[Any]:
    """What `fused_layer` reads of a module and of those inside. Weights that have changed are no longer converted."""
    own, forward = module.__dict__, module.__dict__.get("forward")
    found = [id(module), id(forward), own["training"], len(own["_forward_hooks"]) + len(own["_forward_pre_hooks"])]
    for weight in own["_parameters"].values():
        found += id(weight), 0 if weight is None or weight.is_inference() else weight._version
    if isinstance(forward, LinearGate):
        found += map(id, forward.converted.values())
    for child in own["_modules"].values():
        if child is not None:
            found += _facts_of(child)
    return found


def _settings(layer: nn.Module) -> tuple[Any, ...]:
    """Settings of a layer and of its parts, which a user may change; without ints, since some count calls."""
    return tuple(
        (name, setting, value)
        for name, module in (("", layer), *layer.named_children())
        for setting, value in vars(module).items()
        if isinstance(value, (bool, float, str))
    )


class Probe:
    """Runs one layer by its own forward and by the kernels, on random states behind some cached tokens."""

    def __init__(self, structure: DecoderStructure, layer_idx: int, layer: nn.Module, fused: FusedLayer) -> None:
        self.structure, self.layer_idx, self.layer, self.fused = structure, layer_idx, layer, fused
        config: Any = getattr(layer.self_attn, "config", None)
        self.attention = getattr(config, "_attn_implementation", None)
        self.generator = torch.Generator().manual_seed(0)
        self.cached = [self._random(1, fused.kv_heads, CACHED_TOKENS, fused.head_size) for _ in range(2)]

    @torch.inference_mode(False)
    @torch.no_grad()
    def is_equal(self) -> bool:
        """Whether the kernels give the results of the layer's own forward, for its output and for its K/V."""
        name = type(self.layer).__name__
        if self.attention not in (*MASKED_BY_BOOL, *MASKED_BY_SUM):
            return False
        inputs, cache = self._inputs(PROBED_WIDTH), self._cache()
        keys, values = self._slots(PROBED_WIDTH)
        try:
            # A copy of the weights would stay. Only kernels multiply float32 by integers.
            with allowed_layouts((PlainWeight,) if upcasts() else ()):
                found = self._native(*inputs, cache), self._by_kernels(*inputs, keys, values)
        except (TypeError, ValueError, RuntimeError) as error:  # of a layer that takes other arguments
            logger.info("%s runs without fused kernels: %s", name, first_line(error))
            return False
        kept: Any = cache.layers[self.layer_idx]
        pairs = [output - inputs[0] for output in found], (kept.keys, keys), (kept.values, values)
        if all(_is_close(*pair) for pair in pairs):
            return True
        logger.info("%s runs without fused kernels, which give other results", name)
        return False

    @torch.inference_mode(False)
    @torch.no_grad()
    def most_tokens(self) -> int:
        """The largest number of tokens, among those probed, up to which the kernels are faster."""
        seconds = measured(f"decoder layer, {self.fused.kind}", 2 * len(MEASURED_WIDTHS), self._measure)
        faster = 0
        for tokens, native, by_kernels in zip(MEASURED_WIDTHS, seconds[::2], seconds[1::2], strict=True):
            if by_kernels > native:
                break
            faster = tokens
        return faster

    def _random(self, *sizes: int) -> Tensor:
        return torch.randn(sizes, generator=self.generator).to(self.fused.dtype)

    def _inputs(self, width: int) -> tuple[Tensor, tuple[Tensor, Tensor], Tensor]:
        angle = torch.randn(1, width, self.fused.head_size // 2, generator=self.generator).repeat(1, 1, 2)
        mask = torch.ones(1, 1, width, CACHED_TOKENS + width, dtype=torch.bool).tril(CACHED_TOKENS)
        if self.attention in MASKED_BY_SUM:
            mask = torch.zeros(mask.shape, dtype=self.fused.dtype).masked_fill(~mask, -torch.inf)
        size = self.fused.size
        return self._random(1, width, size), (angle.cos().to(self.fused.dtype), angle.sin().to(self.fused.dtype)), mask

    def _cache(self) -> DynamicCache:
        cache = DynamicCache()
        cache.update(self.cached[0], self.cached[1], self.layer_idx)
        return cache

    def _slots(self, width: int) -> list[Tensor]:
        """The cached keys and values, with slots for `width` more."""
        return [torch.cat([part, part.new_zeros(*part.shape[:2], width, part.shape[3])], dim=2) for part in self.cached]

    def _native(self, state: Tensor, angles: tuple[Tensor, Tensor], mask: Tensor, cache: DynamicCache) -> Tensor:
        with active(LayerRun(self.structure, cache)):
            output = self.layer(
                state, attention_mask=mask, position_embeddings=angles, use_cache=True, **{CACHE: cache}
            )
        return output[0] if isinstance(output, tuple) else output

    def _native_anew(self, *inputs: Any) -> Tensor:
        state, angles, mask = inputs
        return self._native(state, angles, mask, self._cache())

    def _by_kernels(
        self, state: Tensor, angles: tuple[Tensor, Tensor], mask: Tensor, keys: Tensor, values: Tensor
    ) -> Tensor:
        return FusedStack([self.fused])([keys], [values], state, *angles, mask, torch.tensor(keys.shape[2]))

    def _measure(self) -> list[float]:
        """For each number of tokens, seconds of the layer's own forward and of the kernels."""
        found = []
        forwards = [module.__dict__.get("forward") for module in self.layer.modules()]
        kept = {gate: dict(gate.converted) for gate in forwards if isinstance(gate, LinearGate)}
        for width in MEASURED_WIDTHS:
            inputs, slots = self._inputs(width), self._slots(width)
            with allowed_layouts(KERNEL_LAYOUTS):
                found.append(least_seconds(partial(self._native_anew, *inputs), REPEATS))
                found.append(least_seconds(partial(self._by_kernels, *inputs, *slots), REPEATS))
        for gate, converted in kept.items():
            gate.keep(converted)  # without copies that no call has asked for
        return found


def _is_close(one: Tensor, other: Tensor) -> bool:
    error, largest = (one - other).abs().max(), one.abs().max()
    return bool(error <= TOLERANCE[one.dtype] * largest)
