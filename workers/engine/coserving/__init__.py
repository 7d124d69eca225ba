"""Scheduling in vLLM by a policy: schedulers, requests, the safepoint and the roll-back."""
