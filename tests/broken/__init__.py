"""Deliberate faults, to see that a test fails with each of them."""
