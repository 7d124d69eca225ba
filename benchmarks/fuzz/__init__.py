"""Hostile input beside honest work."""
