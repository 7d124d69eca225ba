"""Policy-driven scheduling in vLLM: schedulers, requests, the safepoint and the roll-back."""
