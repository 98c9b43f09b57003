"""Axes that record what is drawn."""


class Axes:
    """Stands in for matplotlib's `Axes`."""

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        return lambda *args, **kwargs: self.calls.append((name, args, kwargs))

    def drawn(self, kind):
        """The arguments of each call of the method `kind`, in order."""
        return [args for name, args, _ in self.calls if name == kind]

    def options(self, kind):
        """The keyword arguments of each call of the method `kind`, in order."""
        return [kwargs for name, _, kwargs in self.calls if name == kind]
