"""Event streams on their way: observed, spliced from socket to socket, and resumed on another engine."""
