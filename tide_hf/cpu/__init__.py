"""What makes passes over few tokens, and over prompts, fast on CPUs.

`kernels` compiles what is in C++: `few_rows` (products, also by rounded weights), `few_queries` and `many_queries`
(attention). `weight_forms` says in which form weights are read the fastest, `linear_gate` has linear layers read them
so, and `shared_heads` has a model attend by the kernels.
"""
