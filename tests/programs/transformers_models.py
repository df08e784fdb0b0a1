"""Models of Hugging Face's transformers, small and with random weights, as its tutorials train them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from programs import LENGTH, VOCABULARY, Lab, Program, adamw

SIZES: dict[str, dict[str, Any]] = {
    "GPT2Config": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 16},
    "LlamaConfig": {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 16,
    },
    "BertConfig": {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "max_position_embeddings": 16,
    },
}  # fmt: skip


def made(lab: Lab, config: str, **options: Any) -> nn.Module:
    import transformers

    sizes = {**SIZES[config], "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, **options}
    if config == "BertConfig":
        sizes |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    if config == "GPT2Config":
        sizes |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    kind = transformers.AutoModelForMaskedLM if config == "BertConfig" else transformers.AutoModelForCausalLM
    own = getattr(transformers, config)(vocab_size=VOCABULARY, **sizes)
    return lab.model(lambda: kind.from_config(own)).train()


def batches(lab: Lab, count: int = 3, samples: int = 6, seed: int = 7) -> list[dict[str, Any]]:
    """Texts of several lengths: padding is masked and does not count in the loss."""
    found = []
    for inputs, labels in lab.batches(count, samples, seed):
        lengths = torch.randint(2, LENGTH + 1, (samples, 1), generator=torch.Generator().manual_seed(seed))
        lengths[0] = LENGTH
        mask = torch.arange(LENGTH) < lengths
        mask[:, :2] = True
        found.append({"input_ids": inputs, "attention_mask": mask.long(), "labels": labels.where(mask, -100)})
    return found


def _trained(cnb: Any, lab: Lab, config: str) -> nn.Module:
    model = made(lab, config)
    model, optimizer = cnb.parallelize(model, adamw(model))
    for step, batch in enumerate(batches(lab)):
        optimizer.zero_grad()
        if step == 1:
            loss, output = cnb.forward_backward(model, None, batch, return_output=True)
            lab.show("logits", output["logits"])
            lab.show("same logits", output.logits.shape == output[1].shape)
        else:
            loss = cnb.forward_backward(model, None, batch)
        lab.show("loss", loss)
        lab.show("norm", nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        optimizer.step()
    model.eval()
    with torch.no_grad():
        for samples in (4, 3, 1):
            batch = batches(lab, 1, samples, seed=samples)[0]
            output = model(**batch)
            lab.show("evaluated", output.loss)
            lab.show("evaluated logits", output.logits)
            lab.show("class", type(output).__name__)
    return model.train()


def gpt2_of_transformers(cnb: Any, lab: Lab) -> nn.Module:
    return _trained(cnb, lab, "GPT2Config")


def bert_of_transformers(cnb: Any, lab: Lab) -> nn.Module:
    return _trained(cnb, lab, "BertConfig")


def llama_of_transformers(cnb: Any, lab: Lab) -> nn.Module:
    return _trained(cnb, lab, "LlamaConfig")


def loop_by_hand_of_transformers(cnb: Any, lab: Lab) -> nn.Module:
    """The loop of the tutorials: outputs = model(**batch); outputs.loss.backward()."""
    model = made(lab, "GPT2Config")
    model, optimizer = cnb.parallelize(model, adamw(model))
    for batch in [*batches(lab, 2), *batches(lab, 1, 3)]:
        outputs = model(**batch)
        outputs.loss.backward()
        lab.show("loss", outputs.loss)
        optimizer.step()
        optimizer.zero_grad()
    return model


PROGRAMS: list[Program] = [
    gpt2_of_transformers, bert_of_transformers, llama_of_transformers, loop_by_hand_of_transformers,
]  # fmt: skip
