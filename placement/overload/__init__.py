"""Overload of the decoders' KV, and parameters that are dropped to make space for it."""
