"""Stores of KV below the host's memory, shared by the engines of a node."""
