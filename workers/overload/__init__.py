"""Parameters that give way in running engines: two of them serve as one pipeline."""
