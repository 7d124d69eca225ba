"""Detect overload of the decoders' KV, and decide which parameters to drop to make space for it."""
