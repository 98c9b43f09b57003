"""Load a base model, one at a time."""

from __future__ import annotations

import os
import threading
from typing import Any

from transformers import AutoModelForCausalLM

# While a model loads, transformers replaces `PreTrainedModel.tie_weights` and puts back what it found. Two loads that
# overlap put back each other's replacement: from then on no model in the process has its head tied to its embeddings.
# Where `name` is a repository of routers, the base model that they name is loaded within: hence the RLock.
_one_at_a_time = threading.RLock()


def load_base_model(name: str | os.PathLike[str], **kwargs: Any) -> Any:
    """`AutoModelForCausalLM.from_pretrained(name, **kwargs)`, safe to call from several threads at once."""
    with _one_at_a_time:
        return AutoModelForCausalLM.from_pretrained(name, **kwargs)
