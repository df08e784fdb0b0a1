"""What is saved, moved, sent and held under precision=bf16 and fp16."""

from pathlib import Path
from typing import Any

import pytest
import torch
from mixed_gpt import made, same, step, whole
from recorded import record_of

import colossal_nb as cnb
from colossal_nb import checks
from colossal_nb.parallel.handle import require
from colossal_nb.parallel.world import World

pytestmark = pytest.mark.ranks


# --- what is saved and moved


def saved(folder: str, strategy: str, other: str, goes_on: bool) -> None:
    model, optimizer = made(strategy)
    scale = require(model).precision.scale
    if scale is not None:
        scale.value, scale.good = 2.0**10, 7
    step(model, optimizer)
    cnb.save(folder, model, optimizer)
    weights, next_loss = whole(model), step(model, optimizer)
    model, optimizer = made(other)
    step(model, optimizer)
    cnb.load(folder, model, optimizer)
    assert same(whole(model), weights)
    assert {v.dtype for state in optimizer.state.values() for v in state.values()} == {torch.float32}
    own = require(model).precision.scale
    if own is not None:
        assert (own.value, own.good) == ((2.0**10, 8) if scale is not None else (2.0**16, 1))
    loss = step(model, optimizer)
    assert abs(loss - next_loss) <= (1e-6 if goes_on else 2e-2) * next_loss


def test_checkpoints_are_fp32_and_know_the_scale(ranks: Any, tmp_path: Path) -> None:
    for number, (strategy, other) in enumerate([
        ("tp=2 precision=fp16", "tp=2 precision=fp16"), ("dp=2 precision=fp16", "pp=2 precision=fp16"),
        ("pp=2 precision=bf16", "tp=2"), ("tp=2", "dp=2 precision=fp16"),
    ]):  # fmt: skip
        ranks(2).run(saved, str(tmp_path / str(number)), strategy, other, strategy == other)


def moved(first: str, second: str) -> None:
    model, optimizer = made(first)
    step(model, optimizer)
    require(model).precision.go_on([2.0**9, 3])
    weights = whole(model)
    model, optimizer = cnb.redistribute(model, optimizer, second)
    assert same(whole(model), weights)
    scale = require(model).precision.scale
    assert (scale is not None) == ("fp16" in second)
    if scale is not None and "fp16" in first:
        assert (scale.value, scale.good) == (2.0**9, 3)
    step(model, optimizer)
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_redistribute_changes_the_precision(ranks: Any) -> None:
    for first, second in [
        ("dp=2 precision=fp16", "tp=2 precision=fp16"), ("tp=2 precision=bf16", "pp=2"),
        ("pp=2", "dp=2 precision=bf16 recompute=full"),
    ]:  # fmt: skip
        ranks(2).run(moved, first, second)


# --- what is sent and held


def recorded(strategy: str) -> dict[str, Any]:
    recorder = World.current().recorder
    recorder.drain()
    model, optimizer = made(strategy)
    frames = [recorder.drain()]
    for _ in range(2):
        step(model, optimizer)
    frames.append(recorder.drain())
    record = record_of(*frames)
    last = record.memory[-1]
    rows = record.slices[record.slices["lane"] == "comm"]
    size = sum(p.numel() for p in require(model).held().values())
    tensors = len(require(model).held())
    weight_bytes = 2 if "precision" in strategy else 4
    wrong = checks.sharding(record)
    wrong += checks.adam_state(record, {World.current().rank: tensors}, weight_bytes=weight_bytes)
    return {
        "wrong": wrong, "numbers": size,
        "held": {name: int(last[name]) for name in ("parameter", "gradient", "optimizer")},
        "scalars": 4 * tensors,
        "sent": {
            kind: {int(b) for b in rows[(rows["kind"] == kind) & (rows["of"] != "shapes")]["payload_bytes"]}
            for kind in ("send", "recv")
        },
        "tp": {int(b) for b in rows[[of.startswith("blocks") for of in rows["of"]]]["payload_bytes"]},
        "gradients": {int(b) for b in rows[rows["of"] == "gradients"]["payload_bytes"]},
    }  # fmt: skip


def test_bytes_held_and_sent(ranks: Any) -> None:
    # An activation of the batch: 8 samples of 6 tokens, 16 wide; a microbatch of pp=2 has half of the samples.
    activation = 8 * 6 * 16
    for strategy in ("dp=2", "tp=2", "pp=2"):
        for precision, each in (("", 4), (" precision=bf16", 2)):
            for found in ranks(2).run(recorded, strategy + precision):
                assert found["wrong"] == []
                masters = 0 if each == 4 else 4
                assert found["held"]["parameter"] == each * found["numbers"]
                assert found["held"]["gradient"] == 4 * found["numbers"]
                assert found["held"]["optimizer"] == (8 + masters) * found["numbers"] + found["scalars"]
                if strategy == "pp=2":
                    assert found["sent"] == {kind: {activation // 2 * each} for kind in ("send", "recv")}
                if strategy == "tp=2":
                    assert found["tp"] == {activation * each}
                if strategy == "dp=2":
                    assert found["gradients"] == {4 * found["numbers"]}
