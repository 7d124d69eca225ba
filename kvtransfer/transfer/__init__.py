"""Prefiller to decoder, once a conversation: over TCP, layer by layer, while the prefill runs."""
