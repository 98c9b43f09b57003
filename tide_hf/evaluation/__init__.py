"""What early exits cost and bring: quality over thresholds, speed against baselines, a look into a model.

`quality` measures perplexity of base model and TIDE over thresholds, and `report` shows it; `teacher_forcing` gives the
exits of one pass over given text. `benchmark` times `generate` against `baselines`; `inspection` tells what a model can
do. `lm_eval/` is a model for lm-eval, `metrics/` a metric for evaluate.
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
