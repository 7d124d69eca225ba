"""Code that is broken on purpose, to see a test turn red."""
