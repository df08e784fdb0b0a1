"""What a whole step of the GPT sends: counts and payloads derived by hand, none computed by the code under test."""

from collections import Counter
from typing import Any

import pytest
import torch
from recorded import record_of
from small_gpt import loss_fn
from torch import nn

import colossal_nb as cnb
from colossal_nb.models import GPT
from colossal_nb.parallel.world import World

pytestmark = pytest.mark.ranks

# The model: 128 classes, 4 blocks, hidden 16, positions 16; the batch: 8 samples of 8 tokens; float32.
# An activation of the whole batch: 8 samples * 8 tokens * 16 * 4 bytes = 4096 bytes.
ACTIVATION = 4096
# Parameters: embedding 128*16 = 2048, positions 16*16 = 256, the last norm 2*16 = 32, head 128*16 = 2048.
#   A block: two norms 2 * 2*16 = 64; qkv 48*16 + 48 = 816; out 16*16 + 16 = 272; up 64*16 + 64 = 1088;
#   down 16*64 + 16 = 1040: together 3280. In all 2048 + 256 + 32 + 2048 + 4 * 3280 = 17504 numbers.
NUMBERS = 17504
# Tensors: embedding, positions, head; the last norm 2; a block 2 * 2 for the norms and 4 * 2 for the linears.
TENSORS = 3 + 2 + 4 * 12
# The agreement on the loss: sum, count, sum of the counts of all means, their spread, dtype, samples, spread of the
# counts, parts that are not exact, presses of Stop, parts that are guessed, parts made otherwise than before, trained
# tensors that nobody knows, those inside the model: 13 numbers of 8 bytes; and the checksum of the data of each rank.
LOSS = (13 + 4) * 8


def moved(strategy: str) -> Counter[tuple[str, str, str, int]]:
    """(kind, group, what for, payload bytes) of all calls of one step, after those in which batches are compared."""
    torch.manual_seed(0)
    model = GPT(vocab_size=128, layers=4, hidden=16, heads=4, max_length=16)
    text = torch.randint(128, (8, 9))
    return moved_by(model, loss_fn, (text[:, :-1], text[:, 1:]), strategy)


def moved_by(model: Any, loss_fn: Any, batch: Any, strategy: str) -> Counter[tuple[str, str, str, int]]:
    recorder = World.current().recorder
    optimizer: Any = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    model, optimizer = cnb.parallelize(model, optimizer, strategy)
    for _ in range(4):
        recorder.drain()
        optimizer.zero_grad()
        cnb.forward_backward(model, loss_fn, *batch)
        optimizer.step()
    rows = record_of(recorder.drain()).slices
    return Counter(
        (str(row["kind"]), str(row["group"]).split(":")[0], _purpose(str(row["of"])), int(row["payload_bytes"]))
        for row in rows[rows["lane"] == "comm"]
    )


def _purpose(of: str) -> str:
    """Module names without their block."""
    return ".".join(part for part in of.split(".") if not part.isdigit())


def test_dp(ranks: Any) -> None:
    # One bucket (25 MiB) takes all gradients: 17504 * 4 bytes. The loss row also says for each of the 53 tensors
    # whether it has a gradient: 8 bytes each.
    expected = {
        ("all_reduce", "dp", "gradients", NUMBERS * 4): 1,
        ("all_reduce", "dp", "loss", LOSS + TENSORS * 8): 1,
    }
    assert ranks(4).run(moved, "dp=4") == [expected] * 4


def test_tp(ranks: Any) -> None:
    # Each block: forward after out and after down, backward before qkv and before up. The embedding's rows are dealt to
    # the ranks: its output is summed forward; the head's input is summed backward. Cross entropy sums three numbers for
    # each of the 64 tokens: 64 * 4 = 256 bytes. One microbatch, no gradient is exchanged.
    expected = {
        ("all_reduce", "tp", "blocks.attention.out", ACTIVATION): 4,
        ("all_reduce", "tp", "blocks.down", ACTIVATION): 4,
        ("all_reduce", "tp", "blocks.attention.qkv", ACTIVATION): 4,
        ("all_reduce", "tp", "blocks.up", ACTIVATION): 4,
        ("all_reduce", "tp", "token", ACTIVATION): 1,
        ("all_reduce", "tp", "head", ACTIVATION): 1,
        ("all_reduce", "tp", "head", 256): 3,
        ("all_reduce", "tp", "loss", LOSS): 1,
    }
    assert ranks(4).run(moved, "tp=4") == [expected] * 4


def test_pp(ranks: Any) -> None:
    # Four microbatches (the default, pp) of 2 samples: 4096 / 4 = 1024 bytes each. At each of the three borders every
    # microbatch crosses once forward as an activation and once backward as its gradient: 3 * 4 sends each way.
    found = ranks(4).run(moved, "pp=4")
    sends = sum((Counter({key[0]: count}) for each in found for key, count in each.items()), Counter())
    assert sends == {"send": 24, "recv": 24, "all_reduce": 4}
    assert {key[3] for each in found for key in each if key[0] in ("send", "recv")} == {ACTIVATION // 4}
    for stage, each in enumerate(found):
        neighbours = (stage > 0) + (stage < 3)
        assert each["all_reduce", "pp", "loss", LOSS] == 1
        assert sum(count for key, count in each.items() if key[0] == "send") == 4 * neighbours
        assert sum(count for key, count in each.items() if key[0] == "recv") == 4 * neighbours
        assert sum(count for key, count in each.items() if "gradient" in key[2] and key[0] == "send") == 4 * (stage > 0)


def normed(strategy: str, frozen: bool) -> Counter[tuple[str, str, str, int]]:
    """A batch norm that trains, or does not; one that never does; one without statistics."""
    torch.manual_seed(0)
    norms = nn.BatchNorm1d(8), nn.BatchNorm1d(8).eval(), nn.BatchNorm1d(8, track_running_stats=False)
    model = nn.Sequential(nn.Linear(4, 8), *norms, nn.Linear(8, 3))
    norms[0].train(not frozen)
    return moved_by(model, nn.functional.cross_entropy, (torch.randn(8, 4), torch.arange(8) % 3), strategy)


def test_running_statistics(ranks: Any) -> None:
    # Two linear layers (40 and 27 numbers) and three norms' weights and biases (16 each) in 10 tensors. Of the norm
    # that trains: 8 means and 8 variances, how many batches it has seen more, and how often each of the 4 parts called
    # it; 4 bytes each.
    expected = {
        ("all_reduce", "dp", "gradients", (40 + 27 + 3 * 16) * 4): 1,
        ("all_reduce", "dp", "loss", LOSS + (10 - 2) * 8): 1,  # of two ranks, not four
    }
    statistics = {("all_reduce", "dp", "statistics", (8 + 8 + 1 + 4) * 4): 1}
    assert ranks(2).run(normed, "dp=2 microbatches=2", False) == [expected | statistics] * 2
    assert ranks(2).run(normed, "dp=2 microbatches=2", True) == [expected] * 2


def test_running_statistics_of_other_stages(ranks: Any) -> None:
    # Of the norm that trains: 8 means and 8 variances of 4 bytes, and one count of 8 bytes.
    found = {frozen: ranks(2).run(normed, "pp=2", frozen) for frozen in (False, True)}
    statistics = ("all_gather", "pp", "statistics", (8 + 8) * 4 + 8)
    for moving, frozen in zip(found[False], found[True], strict=True):
        assert moving - frozen == {statistics: 1} and frozen - moving == {}
