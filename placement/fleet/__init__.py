"""Decisions about a fleet: where turns go, and which engines there should be."""
