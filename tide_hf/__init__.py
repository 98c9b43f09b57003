"""Token-informed depth for Hugging Face causal language models."""

from .calibration import calibrate
from .configuration_tide import TIDEConfig
from .errors import TIDEError, UnsupportedModelError
from .logits_process import TIDELogitsProcessor
from .model import TIDEModelForCausalLM
from .modeling_tide import TIDERouters
from .stats import ExitStats

__version__ = "0.1.0"

__all__ = [
    "ExitStats",
    "TIDEConfig",
    "TIDEError",
    "TIDELogitsProcessor",
    "TIDEModelForCausalLM",
    "TIDERouters",
    "UnsupportedModelError",
    "calibrate",
]
