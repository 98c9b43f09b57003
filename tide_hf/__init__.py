"""Token-informed depth for Hugging Face causal language models."""

from .configuration_tide import TIDEConfig
from .errors import TIDEError, UnsupportedModelError
from .model import TIDEModelForCausalLM
from .modeling_tide import TIDERouters
from .stats import ExitStats

__version__ = "0.1.0"

__all__ = [
    "ExitStats",
    "TIDEConfig",
    "TIDEError",
    "TIDEModelForCausalLM",
    "TIDERouters",
    "UnsupportedModelError",
]
