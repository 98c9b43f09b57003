"""The command line ``tide-hf``: `main` parses the arguments and calls `run` in the module named after the command.

`parser` defines the arguments, `model_arguments` loads the named model and routers, `prompts` reads prompts,
`streaming` prints answers, and `demo_model` fetches the demo's model from PyPI if the Hub cannot be reached. The
commands: `benchmark`, `calibrate`, `chat`, `completion`, `demo`, `evaluate`, `generate`, `inspect`, `push`, `serve`.
"""
