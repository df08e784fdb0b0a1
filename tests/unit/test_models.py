"""The models are plain torch and say what is wrong with their arguments."""

import pytest
import torch
from torch import nn

from colossal_nb.models import GPT, MLP


def test_gpt_gives_logits_for_each_token() -> None:
    model = GPT(vocab_size=13, layers=2, hidden=8, heads=2)
    assert model(torch.zeros(3, 5, dtype=torch.int64)).shape == (3, 5, 13)


def test_gpt_sees_only_the_past() -> None:
    torch.manual_seed(0)
    model = GPT(vocab_size=13, layers=2, hidden=8, heads=2)
    tokens = torch.arange(6)[None] % 13
    changed = tokens.clone()
    changed[0, 4] = 9
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :4], after[:, :4], rtol=0, atol=0)
    assert not torch.equal(before[:, 4:], after[:, 4:])


def test_gpt_starts_near_the_uniform_guess() -> None:
    torch.manual_seed(0)
    model = GPT(vocab_size=64, layers=3, hidden=32, heads=4)
    tokens = torch.randint(64, (4, 16))
    loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    assert abs(loss.item() - torch.log(torch.tensor(64.0)).item()) < 0.1


def test_gpt_dropout_only_in_training() -> None:
    torch.manual_seed(0)
    model = GPT(vocab_size=13, layers=1, hidden=8, heads=2, dropout=0.5)
    tokens = torch.arange(6)[None]
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))


def test_gpt_tied_head_is_the_embedding() -> None:
    model = GPT(vocab_size=13, layers=1, hidden=8, heads=2, tied=True)
    assert model.head.weight is model.token.weight


def test_gpt_refuses_heads_that_do_not_divide() -> None:
    with pytest.raises(ValueError, match=r"heads=3 does not divide hidden=8: take heads=2 or hidden=9"):
        GPT(vocab_size=13, layers=1, hidden=8, heads=3)


def test_gpt_refuses_a_sequence_that_is_too_long() -> None:
    model = GPT(vocab_size=13, layers=1, hidden=8, heads=2, max_length=4)
    with pytest.raises(ValueError, match="5 tokens are longer than max_length=4"):
        model(torch.zeros(1, 5, dtype=torch.int64))


def test_mlp_shapes_and_layers() -> None:
    model = MLP(features=6, hidden=8, classes=3, layers=4)
    assert [tuple(layer.weight.shape) for layer in model.layers] == [(8, 6), (8, 8), (8, 8), (3, 8)]
    assert model(torch.zeros(5, 6)).shape == (5, 3)


def test_mlp_refuses_a_single_layer() -> None:
    with pytest.raises(ValueError, match="layers=1"):
        MLP(features=6, hidden=8, classes=3, layers=1)


@pytest.mark.parametrize("model", [GPT(13, 1, 8, 2), GPT(3, 1, 8, 2, max_length=4), MLP(6, 8, 3)])
def test_example_inputs_fit_the_model(model: GPT | MLP) -> None:
    inputs = model.example_inputs()
    assert inputs[0].shape[0] == 2
    assert model(*inputs).shape[0] == 2
