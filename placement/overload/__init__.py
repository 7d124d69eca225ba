"""Overload: more KV asked for than there is, and parameters that could give way."""
