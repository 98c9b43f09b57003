"""Who runs a pass: the eager engine, and the static one, on compiled steps of fixed shape.

`kinds` are the engines as users name them, with what they keep from call to call, and `capturable` tells what no step
can do. `eager` runs the model's own forward, `static` the steps of `steps/`. `shared_heads` has a model attend with
grouped query heads as they are stored, and `warming_up` makes steps ready before the first answer.
"""
