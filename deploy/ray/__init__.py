"""Ray: our own cluster or an existing one, and the actors that place and supervise the fleet."""
