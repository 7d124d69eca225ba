"""Grammars of structured outputs: compiled within a budget, in a process that can be killed."""
