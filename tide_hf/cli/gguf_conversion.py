"""Turn a GGUF file into a folder of float32 weights: ``python -m tide_hf.cli.gguf_conversion FILE FOLDER``.

It runs in a process of its own, since only there the ``gguf`` package has to be importable, and since the process
gives back the memory that two copies of the weights take.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def convert(gguf_file: Path, folder: Path) -> None:
    """Write model, generation config and tokenizer of `gguf_file` to `folder` as safetensors and JSON.

    Args:
        gguf_file: The GGUF file of a causal language model.
        folder: Where to write; made where it does not exist.
    """
    source = gguf_file.parent
    loaded: Any = AutoModelForCausalLM.from_pretrained(source, gguf_file=gguf_file.name, dtype=torch.float32)
    # Weights are dequantised by now, but the loaded model is still marked as quantised and refuses to be saved.
    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    plain = type(loaded)(config)
    plain.load_state_dict(loaded.state_dict())
    plain.generation_config = loaded.generation_config
    plain.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source, gguf_file=gguf_file.name).save_pretrained(folder)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
