"""The things a simulation moves: conversations, engines, their KV, links."""
