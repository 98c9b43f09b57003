"""What the Hugging Face libraries meet: base models and shipped routers that are loaded, and the auto classes.

`load` loads base models and finds the routers that come with this library; `auto_classes` and `registration` tell
transformers about routers; `provenance` says what figures were measured with.
"""
