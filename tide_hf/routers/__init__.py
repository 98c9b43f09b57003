"""The learned modules (routers and exit heads), with their config, files and model card.

`routers` has the `PreTrainedModel` that holds all learned modules, `config` its config. `exit_points` has the modules
of an exit layer, `draft_head` the draft head of EAGLE-3's shape, `draft_head_config` its sizes. `eagle3` reads draft
heads in other formats, `speculators` has the one that vLLM loads. `files` saves routers and refuses damaged files;
`pickled` reads tensors that `torch.save` wrote. `publish` uploads routers with their `card`; `tables` formats the
calibration record for the card and the terminal.
"""
