"""Worker side of a split: drops and restores layers, and computes the batches of other members."""
