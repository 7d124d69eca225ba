"""The control service of an engine: watch it, release conversations, drain it."""
