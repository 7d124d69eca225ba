"""Connector inside vLLM that transfers, retains and parks KV. Also holds the base of its exceptions."""


class KVTransferError(Exception):
    """Base of this package's exceptions; the message says what is wrong."""
