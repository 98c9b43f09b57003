"""An OpenAI-compatible chat server whose requests decode together, on one machine or on many.

Modules, in import order: `protocol` (what goes over the wire), `requests` (checks of what comes in), `text` (tokens to
text), `job` (one request), `served_model` (a batch of requests through the model), `batching` (which requests share a
batch), `metrics`, `limits` (what is refused), `app` (HTTP), `http_server` (how it stops), `deployment` (replicas on
Ray Serve) and `transformers_server` (the model inside `transformers serve`).
"""
