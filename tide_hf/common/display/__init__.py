"""What people see of an answer: `stats_views`, in a notebook, on a page or in a plot.

`token_texts` cuts an answer up into tokens, `depth_colours` colours them by the depth that each used, and `plotting` is
what all plots share. `progress` shows how far long work is.
"""
