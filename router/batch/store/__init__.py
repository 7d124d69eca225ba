"""What must survive: files, batches, their requests and results."""
