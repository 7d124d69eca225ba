"""Size a fleet: capacity signals, advice, autoscaling, provisioning and power."""
