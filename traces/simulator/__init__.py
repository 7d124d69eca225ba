"""Discrete-event simulation of a fleet, with the product's own placing classes deciding."""
