"""Server-sent event streams: observe them, splice them between sockets, resume them on another engine."""
