"""A vision transformer: an image as a row of patches, a class token, a classifier. Plain sequential torch."""

import torch
from torch import Tensor, nn

from colossal_nb.models.parts import Block, check_dropout, check_heads, check_sizes, start, start_residual


class ViT(nn.Module):
    """A classifier of square images.

    image_size and patch_size (pixels; the patch must divide the image), classes, layers (blocks), hidden (width),
    heads (must divide hidden), channels, dropout (probability). Weights start as those of GPT, class token and
    positions as an embedding.
    """

    def __init__(
        self,
        image_size: int,
        patch_size: int,
        classes: int,
        layers: int,
        hidden: int,
        heads: int,
        channels: int = 3,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        check_sizes(image_size=image_size, patch_size=patch_size, classes=classes, layers=layers, channels=channels)
        check_heads(hidden, heads)
        check_dropout(dropout)
        if image_size % patch_size:
            near = [str(n) for n in range(1, image_size + 1) if image_size % n == 0]
            raise ValueError(f"patch_size={patch_size} does not divide image_size={image_size}: take {', '.join(near)}")
        self.image_size, self.channels = image_size, channels
        self.patches = nn.Conv2d(channels, hidden, patch_size, stride=patch_size)
        self.class_token = nn.Parameter(torch.empty(1, 1, hidden))
        self.positions = nn.Parameter(torch.empty(1, 1 + (image_size // patch_size) ** 2, hidden))
        self.drop = nn.Dropout(dropout)
        blocks = [Block(hidden, heads, dropout, causal=False) for _ in range(layers)]
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, classes)
        self.apply(start)
        nn.init.normal_(self.class_token, std=0.02)
        nn.init.normal_(self.positions, std=0.02)
        start_residual((each for block in blocks for each in (block.attention.out, block.down)), layers)

    def forward(self, images: Tensor) -> Tensor:
        """Images (batch, channels, image_size, image_size) -> logits (batch, classes)."""
        expected = (self.channels, self.image_size, self.image_size)
        if tuple(images.shape[1:]) != expected:
            raise ValueError(
                f"images of shape {list(images.shape)}: this ViT takes (batch, {', '.join(map(str, expected))})"
            )
        patches = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat((self.class_token.expand(len(patches), -1, -1), patches), dim=1)
        x = self.drop(x + self.positions)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x)[:, 0])
        return logits

    def example_inputs(self) -> tuple[Tensor]:
        """A small input of the right kind: floats (2, channels, image_size, image_size)."""
        weight = self.class_token
        steps = 2 * self.channels * self.image_size**2
        values = torch.linspace(-1, 1, steps, dtype=weight.dtype, device=weight.device)
        return (values.view(2, self.channels, self.image_size, self.image_size),)
