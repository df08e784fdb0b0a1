"""torch's own transformer encoders in evaluation: as torch computes them, without the fused kernels.

Without gradients in eval mode a layer hands its weights to one kernel, past the calls of its linears: where these hold
parts of their weights the numbers would be those of a part. With a padding mask (at the end of each row) the encoder
also packs the samples into a nested tensor, and what was padding comes out as zeros: that is kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn


@contextmanager
def modules_call_modules() -> Iterator[None]:
    """Inside, torch's transformer modules call their parts."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


@contextmanager
def unfused(model: nn.Module) -> Iterator[None]:
    """Inside, encoders of the model give what they would give with the fused kernels, padding too."""
    with ExitStack() as stack:
        if torch.backends.mha.get_fastpath_enabled():
            for encoder in model.modules():
                if isinstance(encoder, nn.TransformerEncoder) and _packs(encoder):
                    handle = encoder.layers[-1].register_forward_hook(_zero_padding, with_kwargs=True)
                    stack.callback(handle.remove)
        stack.enter_context(modules_call_modules())
        yield


def _packs(encoder: nn.TransformerEncoder) -> bool:
    """Whether it would make a nested tensor of a padded batch."""
    grows = torch.is_grad_enabled() and any(p.requires_grad for p in encoder.layers[0].parameters())
    return bool(getattr(encoder, "use_nested_tensor", False)) and not encoder.layers[0].training and not grows


def _zero_padding(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor | None:
    """A forward hook of an encoder's last layer. Its mask holds -inf where padding is."""
    mask = kwargs.get("src_key_padding_mask")
    if mask is None or kwargs.get("src_mask") is not None or output.dim() != 3 or torch.is_autocast_enabled():
        return None
    padding = mask.bool()
    at_the_end = bool((padding[:, 1:] >= padding[:, :-1]).all())
    return output.masked_fill(padding.unsqueeze(-1), 0.0) if at_the_end else None
