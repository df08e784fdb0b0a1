"""A lazy model has no memory, and the weights of eager construction."""

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from odd_models import Asking, Initialized, Sharing, Torchs, same
from torch import nn

import colossal_nb as cnb
from colossal_nb.models import BERT, GPT, Llama, ViT
from colossal_nb.parallel import lazy, recipe

Make = Callable[[], nn.Module]
OURS: dict[str, Make] = {
    "gpt": lambda: GPT(257, layers=2, hidden=64, heads=4),
    "tied": lambda: GPT(257, layers=2, hidden=64, heads=4, tied=True),
    "llama": lambda: Llama(257, layers=2, hidden=64, heads=4, kv_heads=2),
    "bert": lambda: BERT(257, layers=2, hidden=64, heads=4),
    "vit": lambda: ViT(32, 4, classes=10, layers=2, hidden=64, heads=4),
}
ODD: dict[str, Make] = {each.__name__: each for each in (Initialized, Asking, Sharing, Torchs)}


def built(make: Make, seed: int = 1) -> nn.Module:
    torch.manual_seed(seed)
    with cnb.lazy():
        return make()


def tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    return dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))


@pytest.mark.parametrize("name", [*OURS, *ODD])
def test_weights_and_random_state_are_those_of_eager_construction(name: str) -> None:
    make = (OURS | ODD)[name]
    torch.manual_seed(1)
    eager = make()
    state = torch.get_rng_state()
    model = built(make)
    assert torch.equal(torch.get_rng_state(), state)
    waiting = {key: t for key, t in tensors(model).items() if isinstance(t, lazy.Waiting)}
    assert waiting
    before = tensors(model)
    lazy.fill(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert list(tensors(model)) == list(tensors(eager))
    for key, expected in tensors(eager).items():
        found = tensors(model)[key]
        assert found is before[key]
        assert type(found) is type(expected)
        assert found.requires_grad == expected.requires_grad
        assert same(found, expected), key
    for key, value in vars(eager).items():
        found = vars(model)[key]
        if isinstance(value, torch.Tensor):
            assert same(found, value)
        elif not key.startswith("_"):
            assert found == value


def test_ties_and_views_share_memory_as_eagerly() -> None:
    model: Any = built(Sharing)
    lazy.fill(model)
    assert model.tied.weight is model.first.weight
    model.flat[0] = 5.0
    assert model.view[0, 0] == 5.0
    model.first.weight.data.zero_()
    assert model.copied.weight.abs().sum() > 0


@pytest.mark.parametrize("config", ["LlamaConfig", "GPT2Config", "BertConfig"])
def test_models_of_transformers(config: str) -> None:
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
    own = getattr(transformers, config)(vocab_size=99, max_position_embeddings=64, **sizes)
    kind = transformers.AutoModelForMaskedLM if config == "BertConfig" else transformers.AutoModelForCausalLM
    torch.manual_seed(1)
    eager = kind.from_config(own)
    model = built(lambda: kind.from_config(own))
    assert lazy.is_waiting(model)
    lazy.fill(model)
    for key, expected in tensors(eager).items():
        assert same(tensors(model)[key], expected), key


def test_no_memory_is_kept_and_little_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all storages only the small ones have memory; while numbers are drawn there is one tensor's at a time."""
    live, peak = set[int](), 0
    largest = 257 * 64 * 4

    def room(size_bytes: int) -> Any:
        nonlocal peak
        gc.collect(0)
        storage = torch.UntypedStorage(size_bytes)
        live.add(size_bytes)
        peak = max(peak, size_bytes)
        return storage

    monkeypatch.setattr(recipe, "room", room)
    monkeypatch.setattr(lazy, "room", room)
    model = built(OURS["gpt"])
    with torch._C.DisableTorchFunctionSubclass():
        kept = [p.untyped_storage().nbytes() for p in model.parameters()]
    assert max(kept) <= lazy.SMALL_BYTES
    assert sum(p.numel() * p.element_size() for p in model.parameters()) > 20 * sum(kept)
    assert peak <= max(largest, 1024 * 64 * 4)


def test_two_models_of_one_block_are_filled_each_by_itself() -> None:
    torch.manual_seed(1)
    first, second = OURS["gpt"](), OURS["llama"]()
    torch.manual_seed(1)
    with cnb.lazy():
        one, other = OURS["gpt"](), OURS["llama"]()
        copied = copy.deepcopy(one)
    lazy.fill(other)
    assert lazy.is_waiting(one)
    lazy.fill(one)
    with torch.no_grad():
        for p in one.parameters():
            p.zero_()  # trained meanwhile: the copy is that of the weights as they were built
    lazy.fill(copied)
    assert all(same(a, b) for a, b in zip(other.parameters(), second.parameters(), strict=True))
    assert all(same(a, b) for a, b in zip(copied.parameters(), first.parameters(), strict=True))


def test_what_is_no_weight_has_its_values_after_the_block() -> None:
    with cnb.lazy():
        torch.manual_seed(2)
        data = torch.randn(100, 100)
        more = [data.sin(), data[3:]]
        nn.Linear(64, 64)
    torch.manual_seed(2)
    assert torch.equal(data, torch.randn(100, 100))
    assert torch.equal(more[0], data.sin())
    assert more[1].data_ptr() == data[3:].data_ptr()


def test_until_parallelize_a_model_has_shapes_and_no_values() -> None:
    model: Any = built(OURS["gpt"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    assert optimizer.param_groups[0]["params"][0] is model.token.weight
    assert model.token.weight.shape == (257, 64) and model.token.weight.dtype == torch.float32
    assert "Embedding(257, 64)" in repr(model)
    assert "no values yet" in repr(model.token.weight)
    assert sum(p.numel() for p in model.parameters()) > 100_000
    for use in (lambda: model(torch.zeros(1, 4, dtype=torch.int64)), model.state_dict, lambda: copy.deepcopy(model)):
        with pytest.raises(RuntimeError, match=r"no values|does not have yet.*cnb\.lazy\(\).*parallelize"):
            use()


def test_an_error_inside_leaves_nothing_behind() -> None:
    with pytest.raises(ZeroDivisionError), cnb.lazy():
        model = nn.Linear(64, 64)
        _ = 1 / 0
    assert torch.randn(64, 64).untyped_storage().nbytes() == 64 * 64 * 4
    with pytest.raises(RuntimeError, match=r"no values|does not have yet"):
        model(torch.ones(64))


def test_a_value_taken_as_an_array_cannot_be_written_to() -> None:
    with cnb.lazy():
        array = nn.Linear(64, 64).weight.detach().numpy()
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 0
