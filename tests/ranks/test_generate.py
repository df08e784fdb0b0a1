"""generate: the same texts under every strategy, by likelihood and by chance, and as a plain loop makes them."""

from typing import Any

import pytest
import torch
from programs import MODELS, VOCABULARY, Plain
from torch import Tensor, nn

import colossal_nb as cnb
from colossal_nb.parallel.world import World

pytestmark = pytest.mark.ranks
PROMPTS = torch.randint(VOCABULARY, (3, 4), generator=torch.Generator().manual_seed(2))


def model(kind: str, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    made = MODELS[kind](**options).double()
    with torch.no_grad():
        for p in made.parameters():
            p.add_(torch.randn_like(p), alpha=0.2)
    return made


def texts(kind: str, strategy: str | None) -> list[Tensor]:
    """Greedy, drawn with torch's own numbers (which then go on alike) and with a generator, ended by a token."""
    made = model(kind, dropout=0.1)
    if strategy is not None:
        cnb.parallelize(made, strategy=strategy)
    made.blocks[0].eval()
    modes = [module.training for module in made.modules()]
    found = [cnb.generate(made, PROMPTS, 5), cnb.generate(made, PROMPTS[0], 3)]
    torch.manual_seed(1 + World.current().rank)  # rank 0's numbers count
    found += [cnb.generate(made, PROMPTS, 6, temperature=0.7), torch.randint(99, (3,))]
    generator = torch.Generator().manual_seed(4)
    found.append(cnb.generate(made, PROMPTS, 6, temperature=1.3, generator=generator))
    found.append(cnb.generate(made, PROMPTS, 14))  # longer than the model sees
    eos = int(found[0][0, 5])
    found.append(cnb.generate(made, PROMPTS, 5, eos=eos))
    found.append(cnb.generate(made, PROMPTS[:1], 5, eos=eos))
    assert [module.training for module in made.modules()] == modes
    return found


@pytest.mark.parametrize("kind", ["gpt", "llama"])
@pytest.mark.parametrize(
    ("count", "strategy"), [(2, "dp=2"), (2, "tp=2"), (2, "pp=2"), (4, "tp=2 pp=2"), (8, "dp=2 tp=2 pp=2")]
)
def test_the_same_texts_everywhere(ranks: Any, count: int, strategy: str, kind: str) -> None:
    expected = texts(kind, None)
    for found in ranks(count).run(texts, kind, strategy):
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_what_is_made_is_what_a_plain_loop_makes() -> None:
    made = model("gpt")
    first, one, *_, ended, alone = found = texts("gpt", None)
    assert torch.equal(first, Plain().generate(made.eval(), PROMPTS, 5))
    assert torch.equal(one, Plain().generate(made, PROMPTS[:1], 3)[0])
    eos = int(first[0, 5])
    assert not torch.equal(found[2], found[4]) and found[5].shape == (3, 18)
    assert alone[0].tolist() == first[0, : alone.shape[1]].tolist() and alone[0, -1] == eos
    stop = alone.shape[1]
    assert ended.shape[1] >= stop and ended[0, :stop].tolist() == alone[0].tolist()
    assert set(ended[0, stop - 1 :].tolist()) == {eos}


def wrong() -> list[str]:
    made = cnb.parallelize(model("gpt"), strategy="tp=2")
    said = []
    odd = PROMPTS + (World.current().rank == 1)
    for tokens, count, temperature in ((odd % VOCABULARY, 1, 0.0), (PROMPTS.float(), 1, 0.0), (PROMPTS, -1, 0.0),
                                       (PROMPTS[:, :0], 1, 0.0), (PROMPTS, 1, -1.0)):  # fmt: skip
        with pytest.raises(ValueError) as error:
            cnb.generate(made, tokens, count, temperature=temperature)
        said.append(str(error.value))
    with pytest.raises(ValueError, match="returns logits") as error:
        cnb.generate(nn.Flatten(), PROMPTS, 1)
    return said


def test_wrong_arguments(ranks: Any) -> None:
    for said in ranks(2).run(wrong):
        for words, text in zip(
            ("of rank 1 differ", "int64 or int32", "at least 0", "no token", "likeliest"), said, strict=True
        ):
            assert words in text
