"""What is trained in examples and tests: plain sequential torch models."""

from colossal_nb.models.gpt import GPT
from colossal_nb.models.mlp import MLP

__all__ = ["GPT", "MLP"]
