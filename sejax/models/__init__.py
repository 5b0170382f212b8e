"""Models: configuration, layer loop, weights, tokenizer."""

from .config import Config
from .loading import load
from .model import Model, logits
from .tokenizer import Tokenizer

__all__ = ["Config", "Model", "Tokenizer", "load", "logits"]
