"""How a weight is read on a CPU: as it is stored, in fewer bits, prepacked or by a kernel.

`reading` decides for a model, in each call, prompt and step. `linear_gate` lets linear layers read their weights in
the layouts that it allows. `fused_layers` runs layers of Llama's kind in one call of a kernel, `fused_passes` those of
eager passes, `fused_head` the draft head's. `layouts` holds the layouts, the matrix products with them, and the
measurement of which is the fastest; `integers` multiplies weights that another package has quantised, `lossless`
copies the others in as few bits as hold their values. `panels` puts weights in the order in which kernels read them the
fastest. `compute_dtype` decides whether a call computes in float32 over weights in half precision, and `upcast` has all
but linear layers do so.
"""
