"""Loading of base models and shipped routers, and registration with transformers' auto classes.

`load` loads base models and finds shipped routers; `gguf` keeps dequantised copies of GGUF files; `registration`
registers `auto_classes` with transformers; `provenance` records how figures were measured.
"""
