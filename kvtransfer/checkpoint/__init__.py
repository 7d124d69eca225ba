"""Copies of conversations' blocks in host memory, and their way back."""
