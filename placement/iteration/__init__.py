"""Decisions inside an engine: which requests an iteration serves, with how many tokens, at whose expense."""
