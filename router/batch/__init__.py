"""Offline work: the Files and Batch APIs, their store, and the dispatcher that feeds the decoders."""
