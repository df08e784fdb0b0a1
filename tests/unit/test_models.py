"""The models are plain torch and say what is wrong with their arguments."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from colossal_nb import corpus
from colossal_nb.models import BERT, GPT, MLP, Llama, ViT
from colossal_nb.models.llama import rotated, rotation


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


def llama(**options: float) -> Llama:
    torch.manual_seed(0)
    return Llama(vocab_size=13, layers=2, hidden=16, heads=4, **options).double()


def test_llama_sees_only_the_past() -> None:
    model, tokens = llama(kv_heads=2), torch.arange(6)[None]
    changed = tokens.clone()
    changed[0, 4] = 9
    before, after = model(tokens), model(changed)
    assert before.shape == (1, 6, 13)
    torch.testing.assert_close(before[:, :4], after[:, :4], rtol=0, atol=0)
    assert not torch.allclose(before[:, 4:], after[:, 4:])


def test_llama_has_the_parts_that_its_kin_have() -> None:
    model = llama(kv_heads=2, inner=24)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert not any(name.endswith("bias") for name in shapes)
    assert shapes["blocks.0.attention.q.weight"] == (16, 16)
    assert shapes["blocks.0.attention.k.weight"] == shapes["blocks.0.attention.v.weight"] == (8, 16)
    assert shapes["blocks.0.mlp.gate.weight"] == shapes["blocks.0.mlp.up.weight"] == (24, 16)
    assert model.head.weight is not model.token.weight
    assert llama().blocks[0].mlp.down.in_features == 48  # 8/3 of 16, to the next multiple of 16


def test_rotary_products_depend_on_the_distance_alone() -> None:
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(6, generator=generator, dtype=torch.float64).expand(1, 1, 9, 6) for _ in range(2))
    turn = rotation(9, 6, 100.0, torch.device("cpu"))
    products = (rotated(query, turn) @ rotated(key, turn).mT)[0, 0]
    for distance in range(-8, 9):
        along = products.diagonal(distance)
        torch.testing.assert_close(along, along[:1].expand_as(along), rtol=1e-5, atol=1e-5)
    assert products[0].std() > 0.1
    angle = torch.tensor(5 * 100.0 ** (-2 / 6))  # position 5, second pair: features 1 and 4
    expected = query[0, 0, 5, 1] * angle.cos() - query[0, 0, 5, 4] * angle.sin()
    assert rotated(query, turn)[0, 0, 5, 1].item() == pytest.approx(expected.item(), rel=1e-5)


def test_llama_with_grouped_heads_is_one_with_repeated_heads() -> None:
    grouped, full = llama(kv_heads=2), llama()
    state = grouped.state_dict()
    for name, value in state.items():
        if name.endswith((".k.weight", ".v.weight")):
            state[name] = value.view(2, 4, 16).repeat_interleave(2, 0).flatten(0, 1)
    full.load_state_dict(state)
    tokens = torch.arange(6)[None]
    torch.testing.assert_close(full(tokens), grouped(tokens), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"hidden": 16, "heads": 4, "kv_heads": 3}, r"kv_heads=3 does not divide heads=4: take 1, 2 or 4"),
        ({"hidden": 12, "heads": 4}, r"heads of 3 features, and rotary positions turn pairs of them: take hidden=16"),
        ({"hidden": 16, "heads": 3}, r"heads=3 does not divide hidden=16: take heads=2 or hidden=18"),
    ],
)
def test_llama_refuses_what_it_cannot_build(options: dict[str, int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Llama(vocab_size=13, layers=1, **options)


def bert(**options: float) -> BERT:
    torch.manual_seed(0)
    return BERT(vocab_size=13, layers=2, hidden=16, heads=4, max_length=8, **options).double()


def test_bert_sees_both_ways_and_not_the_padding() -> None:
    model, tokens = bert(), torch.arange(6)[None]
    seen = torch.tensor([[1, 1, 1, 1, 0, 0]])
    masked, alone = model(tokens, attention_mask=seen), model(tokens[:, :4])
    torch.testing.assert_close(masked[:, :4], alone, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(model(tokens, attention_mask=seen.bool()), masked, rtol=0, atol=0)
    changed = tokens.clone()
    changed[0, 3] = 9
    assert not torch.allclose(model(changed)[:, :3], model(tokens)[:, :3])


def test_bert_knows_segments_and_places() -> None:
    model, tokens = bert(), torch.full((1, 6), 3)
    first = model(tokens)
    assert torch.equal(first, model(tokens, token_types=torch.zeros_like(tokens)))
    assert not torch.allclose(first, model(tokens, token_types=torch.ones_like(tokens)))
    assert not torch.allclose(first[:, 0], first[:, 1])


def test_bert_reads_out_with_its_embedding() -> None:
    model = bert()
    assert model.head.decoder.weight is model.token.weight
    assert model.head.decoder.bias.shape == (13,)
    with pytest.raises(ValueError, match="9 tokens are longer than max_length=8"):
        model(torch.zeros(1, 9, dtype=torch.int64))


def vit(**options: float) -> ViT:
    torch.manual_seed(0)
    return ViT(image_size=8, patch_size=4, classes=5, layers=2, hidden=16, heads=4, channels=2, **options)


def test_vit_reads_patches_in_their_places() -> None:
    model, images = vit(), torch.rand(3, 2, 8, 8)
    assert model(images).shape == (3, 5)
    assert model.positions.shape == (1, 1 + 4, 16)
    swapped = torch.cat((images[..., 4:], images[..., :4]), -1)  # the same patches elsewhere
    assert not torch.allclose(model(images), model(swapped))
    with torch.no_grad():
        model.positions.zero_()
    torch.testing.assert_close(model(images), model(swapped))


def test_vit_refuses_other_images() -> None:
    with pytest.raises(ValueError, match=r"images of shape \[3, 1, 8, 8\]: this ViT takes \(batch, 2, 8, 8\)"):
        vit()(torch.zeros(3, 1, 8, 8))
    with pytest.raises(ValueError, match="patch_size=3 does not divide image_size=8: take 1, 2, 4, 8"):
        ViT(image_size=8, patch_size=3, classes=5, layers=1, hidden=16, heads=4)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: GPT(0, 1, 8, 2, max_length=0), "vocab_size=0, max_length=0: each must be a whole number, at least 1"),
        (lambda: Llama(13, 0, 8, 2), "layers=0"),
        (lambda: Llama(13, 1, 8, 2, inner=0), "inner=0"),
        (lambda: Llama(13, 1, 8, 2, kv_heads=0), "kv_heads=0 does not divide heads=2: take 1 or 2"),
        (lambda: BERT(13, 1, 8, 0, types=1), "heads=0"),
        (lambda: BERT(13, 1, 8, 2, types=0), "types=0"),
        (lambda: ViT(8, 0, 5, 1, 8, 2), "patch_size=0"),
    ],
)
def test_nothing_is_built_of_no_size(make: Callable[[], nn.Module], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.parametrize("make", [llama, bert, vit])
def test_dropout_only_in_training(make: type[nn.Module]) -> None:
    for rate in (0.0, 0.5):
        model = make(dropout=rate)
        inputs = model.example_inputs()
        assert torch.equal(model(*inputs), model(*inputs)) == (rate == 0)
        model.eval()
        assert torch.equal(model(*inputs), model(*inputs))


@pytest.mark.parametrize(("make", "classes"), [(llama, 13), (bert, 13), (vit, 5)])
def test_all_start_near_the_uniform_guess(make: type[nn.Module], classes: int) -> None:
    model = make()
    logits: Tensor = model(*model.example_inputs()).flatten(0, -2)
    loss = nn.functional.cross_entropy(logits, torch.arange(len(logits)) % classes)
    assert abs(loss.item() - math.log(classes)) < 0.1


def test_vit_learns_to_read_digits() -> None:
    images, labels = corpus.digits("train")
    unseen, truth = corpus.digits("validation")
    torch.manual_seed(0)
    model = ViT(image_size=8, patch_size=4, classes=10, layers=2, hidden=32, heads=4, channels=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(6):
        for chosen in torch.randperm(len(images)).split(128):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[chosen]), labels[chosen]).backward()
            optimizer.step()
    assert (model(unseen).argmax(-1) == truth).float().mean() > 0.85


MODELS = [GPT(13, 1, 8, 2), GPT(3, 1, 8, 2, max_length=4), MLP(6, 8, 3), Llama(13, 1, 8, 2), BERT(13, 1, 8, 2), vit()]


@pytest.mark.parametrize("model", MODELS, ids=lambda model: type(model).__name__)
def test_example_inputs_fit_the_model(model: GPT | MLP | Llama | BERT | ViT) -> None:
    inputs = model.example_inputs()
    assert inputs[0].shape[0] == 2
    assert model(*inputs).shape[0] == 2
