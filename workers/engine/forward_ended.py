"""Exception that ends a forward pass before its last layer."""


class ForwardEnded(BaseException):
    """Signal to end a forward pass. Not an `Exception`, so that no handler in the model catches it."""
