"""Deterministic simulation of the control plane: the product's processes on one virtual clock."""
