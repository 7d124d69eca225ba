"""Simulates a fleet, event by event, with the product's own classes placing turns."""
