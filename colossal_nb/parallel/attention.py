"""Attention in the open: torch's scaled_dot_product_attention with its weights at hand."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


def attention_weights(given: dict[str, Any]) -> Tensor:
    """softmax(q k^T / sqrt(width)) with its masks; a row in which nothing may be seen is 0."""
    query, key = given["query"], repeated(given["key"], given)
    scale = given["scale"] if given["scale"] is not None else 1 / math.sqrt(query.shape[-1])
    scores = query @ key.transpose(-2, -1) * scale
    mask = given["attn_mask"]
    if given["is_causal"]:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if mask is None:
        return torch.softmax(scores, -1)
    scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    blind = (scores == -math.inf).all(-1, keepdim=True)
    return torch.softmax(scores.masked_fill(blind, 0), -1).masked_fill(blind, 0)


def repeated(x: Tensor, given: dict[str, Any]) -> Tensor:
    """Keys or values as often as there are query heads."""
    if not given["enable_gqa"]:
        return x
    return x.repeat_interleave(given["query"].shape[-3] // x.shape[-3], dim=-3)


def attention_arguments(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """The arguments of scaled_dot_product_attention by name; it has no signature of its own."""
    return {
        "query": query, "key": key, "value": value, "attn_mask": attn_mask, "dropout_p": dropout_p,
        "is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa,
    }  # fmt: skip
