"""Words that settings may take. The command line needs them before torch and transformers are loaded."""

from __future__ import annotations

DEFAULT_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
DTYPES = ("float32", "bfloat16", "float16")
MODES = ("self_speculative", "early_exit", "post_hoc")
ENGINES = ("eager", "compiled", "cuda_graph", "auto")
EXIT_STRATEGIES = ("identity", "linear")  # kinds of exit head
STRATEGIES = (*EXIT_STRATEGIES, "block")  # of what `calibrate` makes
EXIT_CRITERIA = ("router", "confidence", "fixed")
KV_CACHE_STRATEGIES = ("propagate", "recompute", "zero_pad")
LABELS = ("agreement", "cosine", "kl")  # what a router predicts
MATCHES = ("exact", "number")  # how answers are compared
