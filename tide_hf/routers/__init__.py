"""What is learned and goes to the Hub: routers and exit heads, their config, and the files that they come in.

`modeling_tide` and `configuration_tide` are a `PreTrainedModel` and its config; `exit_points` is what stands at an exit
layer, `block_head` the head with a decoder layer of its own. The files may be anybody's: `config_checks` and
`router_files` say what is refused, and why.
"""
