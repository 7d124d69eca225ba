"""Offline work: the Files and Batch APIs, their store, and the dispatcher that sends it to engines."""
