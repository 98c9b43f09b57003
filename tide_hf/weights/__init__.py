"""How a weight is read on a CPU: as it is stored, in fewer bits, prepacked or by a kernel.

`reading` decides for a model, in each call, prompt and step. `linear_gate` lets linear layers read their weights in
the layouts that it allows, and `fused_layers` runs layers of Llama's kind as one or two kernels each. `layouts` holds
the layouts, the matrix products with them, and the measurement of which is the fastest; `integers` multiplies weights
that another package has quantised, `lossless` those in float32 that came from fewer bits.
"""
