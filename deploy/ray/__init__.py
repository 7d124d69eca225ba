"""Ray: a cluster of our own or an existing one, and the actors that place and supervise the fleet."""
