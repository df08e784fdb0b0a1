"""What is trained in examples and tests: plain sequential torch models."""

from colossal_nb.models.bert import BERT
from colossal_nb.models.gpt import GPT
from colossal_nb.models.llama import Llama
from colossal_nb.models.mlp import MLP
from colossal_nb.models.vit import ViT

__all__ = ["BERT", "GPT", "MLP", "Llama", "ViT"]
