"""The directory's own process, which the Ray actor of `deploy/ray/directory_actor.py` hosts."""
