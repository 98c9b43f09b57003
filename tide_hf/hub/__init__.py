"""Loading of base models and shipped routers, and registration with transformers' auto classes.

`load` loads base models and finds shipped routers; `auto_classes` and `registration` register routers with
transformers; `provenance` records how figures were measured.
"""
