"""Decide which engines serve a conversation: its decoder, and the prefiller of its first prompt."""
