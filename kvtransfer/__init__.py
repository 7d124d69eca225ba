"""KV that moves or waits, as one connector inside vLLM; and the base of what goes wrong with it."""


class KVTransferError(Exception):
    """Base of this package's exceptions; the message says what is wrong."""
