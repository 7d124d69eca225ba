"""Overload of the KV: plain preemption, parking and parameter drop under the same bursts."""
