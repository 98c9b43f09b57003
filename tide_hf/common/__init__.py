"""What every room may use: errors, the choices of settings, files, statistics of a call, and how they are shown.

`errors` are the typed errors; `choices` the values that settings may take; `files` the cache folder, and files that are
written whole or not at all; `hub_access` tells whether the Hub can be reached; `stats` counts what a call executed;
`padding` and `chat_prompts` are about token ids and chats, `rows` reads local data files, `timing` measures. `display/`
shows an answer to people.
"""
