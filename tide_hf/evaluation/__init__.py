"""Evaluation of early exits: quality at several thresholds, speed against baselines, facts about a model.

`quality` measures and shows perplexity by threshold; `teacher_forcing` computes early-exit logits of a given text.
`benchmark` times `generate` against baselines; `inspection` reports what a model supports. `lm_eval/` contains
a model for lm-eval, `metrics/` a metric for the `evaluate` library.
"""

from .quality import THRESHOLDS, QualityOptions, measure_quality
from .teacher_forcing import ExitLogits, exit_logits

__all__ = ["THRESHOLDS", "ExitLogits", "QualityOptions", "exit_logits", "measure_quality"]
