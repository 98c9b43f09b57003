"""Modules that every other subpackage may use.

`errors` has the typed errors; `choices` the values that settings may take; `files` the cache folder and atomic writes;
`hub_access` tells whether the Hub can be reached; `memory` how much memory is free, within the limits of containers and
processes, and `huge_pages` makes tensors that are read faster; `token_ids` makes prompts and chats into batches of
token ids; `data_files` reads local data files; `stats` counts what a call executed, and `display` shows it in HTML and
plots; `token_sources` names what wrote a token, which `draft_streamer` shows while it happens; `progress` shows the
progress of long work; `timing` times functions, `measurements` keeps such times between processes; `busy` tells of
other programs' load; `version` has the library's.
"""
