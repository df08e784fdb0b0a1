"""Modules whose constructors do what people do to weights."""

import copy

import torch
from torch import Tensor, nn


class Initialized(nn.Module):
    """Torch's own ways to begin, and arithmetic by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(300, 64, padding_idx=3)
        self.truncated = nn.Linear(64, 300, bias=False)
        nn.init.trunc_normal_(self.truncated.weight, std=0.02)
        self.orthogonal = nn.Linear(64, 64)
        nn.init.orthogonal_(self.orthogonal.weight)
        self.xavier = nn.Parameter(torch.empty(64, 64))
        nn.init.xavier_uniform_(self.xavier, gain=0.5)
        self.scale = nn.Parameter(torch.ones(3) * 0.5)
        self.wide = nn.Parameter(torch.ones(3000) * 0.5)
        self.product = nn.Parameter(torch.randn(64, 64) @ torch.randn(64, 64).T)
        self.own = nn.Parameter(torch.empty(64, 64).normal_(generator=torch.Generator().manual_seed(3)))
        self.embedding.weight.data[5].zero_()
        self.embedding.weight.data.normal_(0, 0.02)
        self.embedding.weight.data[3] = 0
        with torch.no_grad():
            self.truncated.weight /= 3.0
            self.truncated.weight[:, :10] = self.embedding.weight[:, :10]
            self.half_width = nn.Parameter(self.orthogonal.weight.half())
        self.register_buffer("mask", torch.tril(torch.ones(64, 64)).bool())
        self.register_buffer("unsaved", torch.outer(torch.arange(64.0), torch.arange(64.0)).sin(), persistent=False)


class Asking(nn.Module):
    """Looks at values while it is built."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 64)
        if self.first.weight.sum() > 0:
            self.first.weight.data.mul_(-1)
        self.largest = self.first.weight.abs().max().item()
        self.total = self.first.weight.detach().numpy().sum()
        self.row = self.first.weight.tolist()[2]
        kept = (self.first.weight > 0).nonzero()
        self.kept = nn.Parameter(torch.randn(len(kept), 2))
        self.plain = torch.arange(5000.0) * 2


class Sharing(nn.Module):
    """Ties, copies, views, parametrizations."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.tied = nn.Linear(64, 64), nn.Linear(64, 64)
        self.tied.weight = self.first.weight
        self.copied = copy.deepcopy(self.first)
        self.first.weight.data.mul_(2)
        self.flat = torch.randn(64 * 64)
        self.view = nn.Parameter(self.flat.view(64, 64))
        self.register_buffer("table", torch.randn(64, 64))
        self.buffer = copy.deepcopy(self.table)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Conv2d(16, 64, 3))


class Torchs(nn.Module):
    """Layers of torch that begin in their own ways."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), 2)
        self.recurrent = nn.LSTM(64, 64)
        self.batch = nn.BatchNorm1d(2000)
        self.bilinear = nn.Bilinear(16, 16, 16)


def same(found: Tensor, expected: Tensor) -> bool:
    return found.dtype == expected.dtype and found.stride() == expected.stride() and torch.equal(found, expected)
