"""What makes vLLM co-serve: its scheduler, its worker, the safepoint and the roll-back."""
