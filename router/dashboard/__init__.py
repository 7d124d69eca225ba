"""A page to look at: engines with their KV, conversations as lanes."""
