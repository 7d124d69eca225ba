"""Where the KV of each conversation is: plain data and decisions, without vLLM."""
