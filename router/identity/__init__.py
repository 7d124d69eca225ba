"""Which conversation a request belongs to: by an id it carries, else by the prefix of its messages."""
