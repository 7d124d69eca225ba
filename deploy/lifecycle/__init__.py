"""A fleet's coming up, being up, and going down, for the command line and for tests."""
