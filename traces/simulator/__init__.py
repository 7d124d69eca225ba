"""Discrete-event simulation of a fleet, in which the product's own classes place turns."""
