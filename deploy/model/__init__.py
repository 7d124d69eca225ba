"""A small model made on the spot: real vLLM, real attention, no download."""

from deploy.model.make import make_model
from deploy.model.shape import ModelShape

__all__ = ["ModelShape", "make_model"]
