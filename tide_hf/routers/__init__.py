"""The learned modules (routers and exit heads), with their config, files and model card.

`routers` has the `PreTrainedModel` that holds all learned modules, `config` its config. `exit_points` has the modules
of an exit layer, `block_head` a head with a decoder layer of its own. `files` saves routers and refuses damaged files.
`publish` uploads routers with their `card`; `tables` formats the calibration record for the card and the terminal.
"""
