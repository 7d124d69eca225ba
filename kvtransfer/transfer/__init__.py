"""Transfer of a prompt's KV from prefiller to decoder over TCP, layer by layer while the prefill runs."""
