"""Physical memory in pages that move between the parameters and the KV of layers."""
