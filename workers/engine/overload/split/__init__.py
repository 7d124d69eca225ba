"""Worker side of a split: drop and restore layers, and serve each other's batches."""
