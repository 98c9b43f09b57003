"""What makes passes over few tokens, and over prompts, fast on CPUs.

`kernels` compiles what is in C++: `products`, by weights as they are stored or rounded, and attention, in
`few_queries` and `many_queries`. `weight_forms` are those in which weights can be read, `form_choice` measures which is
the fastest, `linear_gate` has linear layers read them so, and `shared_heads` has a model attend by the kernels.
"""
