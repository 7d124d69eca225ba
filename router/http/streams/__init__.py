"""Event streams on their way through: observed, spliced from socket to socket, and resumed on another engine."""
