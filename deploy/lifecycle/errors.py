class LifecycleError(Exception):
    """The fleet cannot be brought up or down as asked; the text is one sentence for a person."""
