"""Drops layers in running engines, two or more of which then serve together as one pipeline."""
