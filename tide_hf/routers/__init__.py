"""What is learned and goes to the Hub: routers and exit heads, their config, their files and their card.

`routers` and `config` are a `PreTrainedModel` and its config; `exit_points` are the modules of an
exit layer, `block_head` the head with a decoder layer of its own. `files` writes them and refuses damaged ones.
`publish` uploads them with the `card`, which shows the calibration record; `tables` shows it in a terminal.
"""
