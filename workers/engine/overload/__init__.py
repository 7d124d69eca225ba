"""Dropping layers in running engines, two or more of which then serve as one pipeline."""
