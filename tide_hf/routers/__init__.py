"""What is learned and goes to the Hub: routers and exit heads, their config, their files and their card.

`routers` and `config` are a `PreTrainedModel` and its config; `exit_points` is what stands at an exit layer, and
`block_head` the head with a decoder layer of its own. Files may be anybody's: `config_checks` and `files` say what is
refused, and why. `publish` uploads them, with the card that `card` writes of the calibration's record (`tables`,
`plots`).
"""
