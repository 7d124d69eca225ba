"""Blocks of live conversations and of offline work go to host memory once, and return from there."""
