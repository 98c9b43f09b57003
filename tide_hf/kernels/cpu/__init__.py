"""What makes passes over few tokens, and over prompts, fast on CPUs.

`compiled` builds what is in C++ and keeps it on disk: `products`, by weights as they are stored or quantised, and
attention, in `few_queries` and `many_queries`. `weight_forms` are the layouts that weights can be read in, and
`form_choice` measures which is the fastest.
"""
