"""What gives way when the KV does not suffice: plain preemption, parking, or parameters."""
