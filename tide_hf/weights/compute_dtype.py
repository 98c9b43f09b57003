"""In which dtype the calls of one model compute: its own, or float32 over weights in half precision (see `upcast`)."""

from __future__ import annotations

import logging
from functools import partial
from time import perf_counter
from typing import Any

import torch
from transformers import DynamicCache

from ..base_model.inputs import takes_media
from ..base_model.parity import probe
from ..base_model.structure import CACHE, DecoderStructure, input_device
from ..common.choices import AUTO, EAGER
from ..common.errors import TIDEError, UnsupportedOptionError
from ..common.measurements import measured
from ..depth.gates import FixedDepthRun, LayerRun, active
from ..kernels.cpu.cpp_kernels import are_ready, build_kernels
from .layouts import PlainWeight
from .linear_gate import allowed_layouts
from .reading import WeightReading
from .upcast import HALF, RoundingLog, upcasting

LEAST_SPEED = 0.95  # of passes in the model's dtype, at which "auto" computes in float32
# Of the layers that are measured, if the model has as many: they exceed the CPU's caches, as those of a whole model do.
# Of smaller models nothing is measured, since these caches hold them.
MEASURED_BYTES = 64 * 2**20
MEASURED_WIDTHS = (1, 4)
ROUNDS = 4
PROMPT = 32  # tokens before the measured passes

logger = logging.getLogger(__name__)


class ComputeDtype:
    """Decides in which dtype each call of one model computes.

    Args:
        structure: Of the model.
        weights: How its weights are read.
        default: `compute_dtype`, as in `TIDEModelForCausalLM.from_pretrained`.
    """

    def __init__(self, structure: DecoderStructure, weights: WeightReading, default: str) -> None:
        self.structure, self.weights, self.default = structure, weights, default
        self._obstacle: tuple[str | None] | None = None  # found by a probe, once
        self._is_fast: dict[int, bool] = {}  # whether float32 is as fast, by number of threads

    def of_call(self, model: Any, asked: str | None, engine: str) -> torch.dtype:
        """The dtype in which a call computes, of which `asked` is its own `compute_dtype`, if any.

        Raises [`UnsupportedOptionError`] if a dtype that was asked for by name is impossible.
        """
        own, name = model.dtype, asked or self.default
        if name == str(own).removeprefix("torch.") or (name == AUTO and own not in HALF):
            return own
        if name == AUTO:
            return torch.float32 if self._pays(model, engine) else own
        obstacle = f"compute_dtype={name!r}" if name != "float32" else self.obstacle(model)
        if obstacle is not None:
            raise UnsupportedOptionError(
                f"a model in {str(own).removeprefix('torch.')} cannot compute in {name} here",
                got=obstacle,
                expected="its own dtype; or float32, on a CPU, for a text model in half precision or quantised",
                do=f"Leave compute_dtype at {AUTO!r}, or load the model with dtype={name!r}.",
            )
        return torch.float32

    def may_upcast(self, model: Any) -> bool:
        """Whether calls may compute in float32 where the model does not."""
        return self.default in (AUTO, "float32") and self._fact_against(model) is None

    def obstacle(self, model: Any) -> str | None:
        """The reason why calls cannot compute in float32; `None` if they can."""
        found = self._fact_against(model)
        if found is None and self._obstacle is None:
            self._obstacle = (self._rounding_of(model),)
        return found or (self._obstacle[0] if self._obstacle is not None else None)

    def _fact_against(self, model: Any) -> str | None:
        """What keeps a model from computing in float32, as far as no pass is needed to see it."""
        facts = {
            f"a model in {model.dtype}": model.dtype not in HALF,
            f"a model on {model.device.type!r}": input_device(model).type != "cpu" or model.device.type != "cpu",
            "pack_weights=False, which leaves linear layers as they are": not self.weights.has_gates,
            "a model that reads images or other media": takes_media(model),
            "a recurrent model": self.structure.is_recurrent,
            "adapters, which compute in their own dtype": hasattr(model, "peft_config"),
            "a model that processes share": (getattr(model, "_tp_size", None) or 1) > 1,
        }
        return next((fact for fact, holds in facts.items() if holds), None)

    def _rounding_of(self, model: Any) -> str | None:
        """What rounds to half precision in a pass that should compute in float32; `None` if nothing does."""
        cache, log = DynamicCache(config=model.config.get_text_config(decoder=True)), RoundingLog()
        # Only kernels multiply float32 by integers. Without copies of weights, which would stay.
        layouts = (PlainWeight,) if build_kernels(torch.float32) else ()
        try:
            with upcasting(), allowed_layouts(layouts), active(LayerRun(self.structure, cache)), log:
                probe(model, self.structure, 0, 2, cache)
        except TIDEError as error:  # of a product of two dtypes
            return error.problem
        return None if log.found is None else f"{type(model).__name__}, which rounds in {log.found}"

    def _pays(self, model: Any, engine: str) -> bool:
        """Whether `"auto"` takes float32: kernels are at hand, and passes are measured to be as fast."""
        dtypes, threads = (torch.float32, model.dtype), torch.get_num_threads()
        if self.weights.use_kernels is False or self._fact_against(model) is not None:
            return False
        if not all(map(are_ready if engine == EAGER else build_kernels, dtypes)) or self.obstacle(model) is not None:
            return False
        if threads not in self._is_fast:
            self._is_fast[threads] = self._is_measured_fast(model)
        return self._is_fast[threads]

    def _is_measured_fast(self, model: Any) -> bool:
        layers = self.structure.layers
        sizes = [[tuple(one.shape) for one in layer.parameters()] for layer in layers[:1]]
        layer_bytes = max(1, sum(one.nbytes for one in layers[0].parameters()))
        if layer_bytes * len(layers) < MEASURED_BYTES:
            return True
        num_layers = min(-(-MEASURED_BYTES // layer_bytes), len(layers) - 1)
        types = {type(one).__name__ for one in layers[0].parameters()}
        name = f"{num_layers} layers of {type(model).__name__} in {model.dtype} and in float32, {types}, {sizes}"
        own, upcast = measured(name, 2, partial(self._measure, model, num_layers))
        name = str(model.dtype).removeprefix("torch.")
        logger.info("passes in float32 take %.2f times as long as in %s", upcast / own, name)
        return own >= LEAST_SPEED * upcast

    @torch.inference_mode(False)
    @torch.no_grad()
    def _measure(self, model: Any, num_layers: int) -> list[float]:
        """The seconds of passes of several widths through the first layers, in the model's dtype and in float32."""
        with self.weights.forgetting_copies():
            least: dict[tuple[bool, int], float] = {}
            both = {is_on: self._pass_of(model, num_layers, is_on) for is_on in (False, True)}
            for _ in range(ROUNDS):  # in turn, since the machine's speed changes
                for is_on, run in both.items():
                    for width in MEASURED_WIDTHS:
                        begin = perf_counter()
                        run(width)
                        seconds = perf_counter() - begin
                        least[is_on, width] = min(seconds, least.get((is_on, width), seconds))
        return [sum(least[is_on, width] for width in MEASURED_WIDTHS) for is_on in both]

    def _pass_of(self, model: Any, num_layers: int, is_on: bool) -> Any:
        """What runs a pass of a width, after a prompt."""
        cache = DynamicCache(config=model.config.get_text_config(decoder=True))
        with upcasting(is_on), self.weights.in_measurement():
            layers = self.weights.execute_layer(num_layers)
        run = FixedDepthRun(self.structure, cache, num_layers, execute_layer=layers)

        def run_pass(width: int) -> None:
            ids = torch.arange(width)[None] % self.structure.vocab_size
            with upcasting(is_on), self.weights.in_measurement(), active(run):
                run.states_after(model, ids, use_cache=True, **{CACHE: cache})

        run_pass(PROMPT)
        for width in MEASURED_WIDTHS:
            run_pass(width)
        return run_pass
