"""What a step of the GPT moves under tensor parallelism: the numbers are derived here, not asked of the code."""

import pytest
import torch
from recorded import record_of
from torch.nn import functional as F

from colossal_nb.models import GPT
from colossal_nb.parallel import tensor
from colossal_nb.parallel.world import World
from colossal_nb.plan.mesh import Mesh
from colossal_nb.plan.strategy import Strategy

pytestmark = pytest.mark.ranks
LAYERS, BATCH, LENGTH, HIDDEN, HEADS, VOCABULARY = 3, 2, 12, 32, 4, 128


def moved(tp: int) -> tuple[list[tuple[str, str, int]], list[tuple[str, str, int]]]:
    """(forward, backward) calls of one step: kind, group, payload bytes."""
    torch.manual_seed(0)
    model = GPT(VOCABULARY, LAYERS, HIDDEN, HEADS, max_length=16)
    recorder = World.current().recorder
    plan = tensor.plan(model, Mesh({"tp": tp}), Strategy.parse(f"tp={tp}"), (model.example_inputs(), {}))
    tensor.apply(model, plan)
    inputs, targets = torch.randint(VOCABULARY, (2, BATCH, LENGTH))
    assert drain(recorder) == [], "the proof leaves nothing in the record"
    loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
    forward = drain(recorder)
    loss.backward()
    return forward, drain(recorder)


def drain(recorder) -> list[tuple[str, str, int]]:
    slices = record_of(recorder.drain()).slices
    return [(str(row["kind"]), str(row["group"]).split(":")[0], int(row["payload_bytes"])) for row in slices]


@pytest.mark.parametrize("tp", [2, 4])
def test_the_calls_of_one_step(ranks, tp: int) -> None:
    # Every all-reduce inside the model is of one tensor (batch, length, hidden) in float32:
    #     2 * 12 * 32 numbers * 4 bytes = 3072 bytes.
    # Forward: the embedding 1; each of the 3 blocks 2 (attention's out, the MLP's down)          -> 1 + 3 * 2 = 7
    # Loss: max, picked logit, sum of exponentials of 2 * 12 samples * 4 bytes = 96 bytes          -> 3
    # Backward: the head's input 1; each block 2 (the input of qkv, that of up)                    -> 1 + 3 * 2 = 7
    # The embedding's backward needs none: every rank has the whole gradient of its output.
    activations = ("all_reduce", "tp", 3072)
    scalars = ("all_reduce", "tp", 96)
    for forward, backward in ranks(tp).run(moved, tp):
        assert forward == [activations] * 7 + [scalars] * 3
        assert backward == [activations] * 7
