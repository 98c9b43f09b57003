"""Loading from the Hub: base models, shipped routers, transformers' auto classes.

`load` loads base models and finds shipped routers; `auto_classes` and `registration` register routers with
transformers; `provenance` records how figures were measured.
"""
