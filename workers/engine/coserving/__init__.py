"""Scheduling by a policy in vLLM: schedulers, requests, the safepoint and the roll-back."""
