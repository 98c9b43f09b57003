"""What early exits cost in quality: perplexity over thresholds, base model against TIDE.

`measure_quality` does all of it; `exit_logits` is the one pass over a text that gives every position's early exit.
"""

from .quality import THRESHOLDS, QualityOptions, measure_quality
from .teacher_forcing import ExitLogits, exit_logits

__all__ = [
    "THRESHOLDS",
    "ExitLogits",
    "QualityOptions",
    "exit_logits",
    "measure_quality",
]
