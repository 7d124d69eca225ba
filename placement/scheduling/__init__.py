"""Decide inside one engine which requests an iteration serves, and with how many tokens."""
