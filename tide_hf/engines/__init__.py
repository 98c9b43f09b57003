"""Which engine runs a call, and the self-speculative loop on the steps of `..steps`, compiled or as CUDA graphs.

`dispatch` goes from the engine that a call asks for to the one that runs it, and `capturable` tells what no step can
do. `captured_decoding` is the loop, `captured_shallow` its draft steps, and `warming_up` makes steps ready before the
first answer.
"""
