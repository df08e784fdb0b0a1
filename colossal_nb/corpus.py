"""Real data without a download: the sources of Python's standard library, and scikit-learn's handwritten digits."""

import os
import sysconfig
import tempfile
import zlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from colossal_nb.validation import called_as, whole_number

SPLITS = ("train", "validation")
_LEFT_OUT = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}


def files(split: str) -> list[Path]:
    """The files of a split, in a fixed order. One file in ten, chosen by a checksum of its name, is for validation."""
    _check_split(split)
    root = Path(sysconfig.get_path("stdlib"))
    kept: list[Path] = []
    for folder, inner, names in os.walk(root):
        inner[:] = [name for name in inner if name not in _LEFT_OUT]
        kept.extend(Path(folder, name) for name in names if name.endswith(".py"))
    rolls = {path: zlib.crc32(path.relative_to(root).as_posix().encode()) % 10 for path in sorted(kept)}
    return [path for path, roll in rolls.items() if (roll == 0) == (split == "validation")]


@cache
def data(split: str) -> Tensor:
    """All bytes of a split, one after another: uint8, 1-dimensional.

    They lie in a file of the user's cache folder, so that the processes of a machine have them in memory once.
    """
    sources = files(split)
    try:
        kept = _kept(split, sources)
        return torch.from_file(str(kept), shared=False, size=kept.stat().st_size, dtype=torch.uint8)
    except OSError:                                    # no folder to write to: a copy for this process
        return torch.frombuffer(bytearray(_joined(sources)), dtype=torch.uint8)


def _joined(sources: list[Path]) -> bytes:
    return b"\n".join(path.read_bytes() for path in sources)


def _kept(split: str, sources: list[Path]) -> Path:
    """The file with these sources as they are now; made if need be, by whoever comes first."""
    about = [(str(path), (state := path.stat()).st_size, state.st_mtime_ns) for path in sources]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "colossal_nb"
    kept = folder / f"corpus-{split}-{zlib.crc32(repr(about).encode()):08x}.bin"
    if not kept.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        number, draft = tempfile.mkstemp(dir=folder)
        try:
            with open(number, "wb") as file:
                file.write(_joined(sources))
            os.replace(draft, kept)
        except BaseException:
            os.unlink(draft)
            raise
    return kept


@called_as("cnb.corpus.batches(count=50, batch_size=16, length=128, seed=0)")
def batches(
    count: int, batch_size: int, length: int, seed: int = 0, split: str = "train"
) -> Iterator[tuple[Tensor, Tensor]]:
    """`count` pairs (inputs, targets), int64 of shape (batch_size, length): random windows and the byte that follows.

    The same arguments give the same batches on every rank.
    """
    count = whole_number("count", count, least=1)
    batch_size, length = whole_number("batch_size", batch_size, least=1), whole_number("length", length, least=1)
    seed = whole_number("seed", seed)
    text = data(split)
    if length + 1 > len(text):
        raise ValueError(f"length={length}: the {split} split has {len(text)} bytes")
    return _windows(text, count, batch_size, length, seed)


def _windows(text: Tensor, count: int, batch_size: int, length: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    steps = torch.arange(length + 1)
    for _ in range(count):
        starts = torch.randint(len(text) - length, (batch_size, 1), generator=generator)
        window = text[starts + steps].long()
        yield window[:, :-1], window[:, 1:]


def unigram_entropy(split: str) -> float:
    """Entropy of single bytes in nats: the loss of a model that knows only how frequent each byte is."""
    share = torch.bincount(data(split).long(), minlength=256).double() / len(data(split))
    return float(-(share * share.clamp_min(1e-300).log()).sum())


def digits(split: str = "train") -> tuple[Tensor, Tensor]:
    """Handwritten digits: images, float32 (samples, 1, 8, 8) from 0 to 1, and labels, int64 (samples,) from 0 to 9.

    The 1797 of scikit-learn's `load_digits` (UCI, "Optical Recognition of Handwritten Digits"), which come with it;
    every fifth is for validation. Raises ModuleNotFoundError where scikit-learn is not installed.
    """
    _check_split(split)
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "corpus.digits() reads its images from scikit-learn: pip install scikit-learn"
        ) from error
    pixels, labels = load_digits(return_X_y=True)
    chosen = (torch.arange(len(labels)) % 5 == 0) == (split == "validation")
    images = torch.from_numpy(pixels).float().view(-1, 1, 8, 8) / 16
    return images[chosen], torch.from_numpy(labels).long()[chosen]


def _check_split(split: str) -> None:
    if split not in SPLITS:
        raise ValueError(f"split={split!r}: it is one of {', '.join(SPLITS)}")
