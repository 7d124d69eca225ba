"""Event streams in passing: observed, spliced from socket to socket, and resumed on another engine."""
