"""Decisions on the size of a fleet: capacity signals, advice, autoscaling, provisioning and power."""
