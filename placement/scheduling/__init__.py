"""Decide which requests each iteration of an engine serves, and how many tokens each gets."""
