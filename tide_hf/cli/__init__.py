"""The command line ``tide-hf``: `main` parses and runs, and each command is the module of its name.

`parser` and `arguments` define the options, `model_arguments` loads what they name, `prompts` reads prompts. What
commands share is in `comparison`, `conversation` and `streaming`. `demo_model` is the demo's own fallback for a model
(with `gguf_conversion`). The commands: `benchmark`, `calibrate`, `chat`, `completion`, `demo`, `evaluate`, `generate`,
`inspect`, `push`, `serve`.
"""
