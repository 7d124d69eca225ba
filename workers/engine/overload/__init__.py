"""Parameter drop in running engines, two or more of which then serve together as one pipeline."""
