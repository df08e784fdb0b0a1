"""`generate`: a language model continues texts, the same ones under every strategy."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from colossal_nb.parallel.agree import differing
from colossal_nb.parallel.batch import checksum, ranks_text
from colossal_nb.parallel.handle import Parallel, find, require
from colossal_nb.parallel.trace import evaluating
from colossal_nb.validation import called_as, real_number, whole_number

_WHOLE = (torch.int64, torch.int32)
_COLDEST = 1e-9  # below it softmax leaves the range of its numbers


@called_as("cnb.generate(model, tokens, new_tokens)")
def generate(
    model: nn.Module,
    tokens: Tensor,
    new_tokens: int,
    *,
    temperature: float = 0.0,
    generator: torch.Generator | None = None,
    eos: int | None = None,
) -> Tensor:
    """Continue token ids (batch, length), or (length,) of one text, by `new_tokens`: (batch, length + new_tokens).

    The likeliest token each time, or with a `temperature` above 0 one drawn from softmax(logits / temperature), with
    the numbers of `generator` (torch's own where none is given; of all ranks rank 0's count). After `eos` a text goes
    on with `eos`, and when all have ended the result is that short. A model with `max_length` sees the last that many
    tokens. The model may be parallel or plain; it runs in eval mode, without gradients, and is afterwards in the mode
    that it was in. Collective for a parallel model. Raises ValueError on wrong arguments, and on all ranks alike where
    these were given different tokens.
    """
    _check(model, tokens, generator)
    new_tokens = whole_number("new_tokens", new_tokens, least=0)
    temperature = real_number("temperature", temperature, 0, "0 takes the likeliest token, 1 draws as the model says")
    eos = None if eos is None else whole_number("eos", eos)
    parallel = require(model) if find(model) is not None else None
    one = tokens.dim() == 1
    found = tokens[None] if one else tokens
    if parallel is not None:
        found = found.to(parallel.device)
        _share(parallel, found, new_tokens, generator)
    ended = torch.zeros(len(found), dtype=torch.bool, device=found.device)
    with evaluating(model), torch.no_grad():
        for _ in range(new_tokens):
            following = _chosen(_logits(model, found), temperature, generator)
            if eos is not None:
                following = following.masked_fill(ended, eos)
                ended |= following == eos
            found = torch.cat([found, following[:, None].to(found.dtype)], 1)
            if eos is not None and bool(ended.all()):
                break
    return found[0] if one else found


def _check(model: Any, tokens: Any, generator: Any) -> None:
    if not isinstance(model, nn.Module):
        raise ValueError(f"generate takes a torch.nn.Module, not {type(model).__name__}")
    if not isinstance(tokens, Tensor) or tokens.dtype not in _WHOLE or tokens.dim() not in (1, 2):
        what = f"{tokens.dtype} {list(tokens.shape)}" if isinstance(tokens, Tensor) else type(tokens).__name__
        raise ValueError(f"tokens are a tensor of int64 or int32, of shape (batch, length) or (length,), not {what}")
    if not tokens.numel():
        raise ValueError(f"tokens of shape {list(tokens.shape)}: there is no token to begin with")
    if generator is not None and not isinstance(generator, torch.Generator):
        raise ValueError(f"generator is a torch.Generator or None, not {type(generator).__name__}")


def _share(parallel: Parallel, tokens: Tensor, new_tokens: int, generator: torch.Generator | None) -> None:
    """All ranks begin alike: the same request, and rank 0's random numbers. Collective."""
    group = parallel.group()
    if group.size == 1:
        return
    odd = differing(checksum([tokens, torch.tensor(new_tokens)]), group, "tokens checksum")
    if odd:
        raise ValueError(
            f"the tokens (or new_tokens) of {ranks_text(odd)} differ from the others': generate takes the same on "
            "every rank"
        )
    state = torch.get_rng_state() if generator is None else generator.get_state()
    group.run("broadcast", [state], root=0, of="random state")
    if generator is None:
        torch.set_rng_state(state)
    else:
        generator.set_state(state)


def _logits(model: nn.Module, tokens: Tensor) -> Tensor:
    """Of what comes next, (batch, vocabulary)."""
    longest = getattr(model, "max_length", None)
    output = model(tokens[:, -longest:] if isinstance(longest, int) else tokens)
    output = output["logits"] if isinstance(output, dict) else getattr(output, "logits", output)
    if not isinstance(output, Tensor) or output.dim() != 3:
        what = f"a tensor {list(output.shape)}" if isinstance(output, Tensor) else type(output).__name__
        raise ValueError(f"generate needs a model that returns logits (batch, length, vocabulary), not {what}")
    return output[:, -1]


def _chosen(logits: Tensor, temperature: float, generator: torch.Generator | None) -> Tensor:
    if not temperature:
        return logits.argmax(-1)
    # On the host: the same numbers on every device, whatever it is.
    chances = torch.softmax(logits.double().cpu() / max(temperature, _COLDEST), -1)
    return torch.multinomial(chances, 1, generator=generator)[:, 0].to(logits.device)
