"""Copies conversations' blocks to host memory and back."""
