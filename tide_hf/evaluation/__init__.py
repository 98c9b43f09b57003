"""What early exits cost and bring: quality over thresholds, speed against baselines, a look into a model.

`quality` measures perplexity over thresholds and shows it; `teacher_forcing` reads the exits of one pass over a text.
`benchmark` times `generate` against baselines; `inspection` tells what a model can do. `lm_eval/` is a model for
lm-eval, `metrics/` a metric for evaluate.
"""

from .quality import THRESHOLDS, QualityOptions, measure_quality
from .teacher_forcing import ExitLogits, exit_logits

__all__ = ["THRESHOLDS", "ExitLogits", "QualityOptions", "exit_logits", "measure_quality"]
