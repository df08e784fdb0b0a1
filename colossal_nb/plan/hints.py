"""Near misses: what people type when they mean one of our fields."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from difflib import get_close_matches

# The word of another tool -> ours. A name without "=" takes the value that was typed.
MEANT = {
    "cp": "sp", "context": "sp", "context_parallel": "sp", "sequence": "sp", "seq": "sp", "ring": "sp_mode=ring",
    "ulysses": "sp_mode=ulysses",
    "ddp": "dp", "data": "dp", "data_parallel": "dp", "replicas": "dp",
    "fsdp": "zero=3", "zero1": "zero=1", "zero2": "zero=2", "zero3": "zero=3", "stage": "zero",
    "mp": "tp", "tensor": "tp", "tensor_parallel": "tp", "model_parallel": "tp", "megatron": "tp",
    "1d": "tp_mode=1d", "2d": "tp_mode=2d", "2.5d": "tp_mode=2.5d", "3d": "tp_mode=3d", "mode": "tp_mode",
    "pipeline": "pp", "pipeline_parallel": "pp", "pipe": "pp", "stages": "pp",
    "gpipe": "schedule=gpipe", "1f1b": "schedule=1f1b", "zbv": "schedule=zbv", "interleaved": "schedule=interleaved",
    "vpp": "chunks", "virtual": "chunks", "interleave": "chunks",
    "microbatch": "microbatches", "micro_batches": "microbatches", "num_microbatches": "microbatches",
    "mb": "microbatches", "m": "microbatches", "accumulate": "microbatches", "grad_accum": "microbatches",
    "bf16": "precision=bf16", "bfloat16": "precision=bf16", "fp16": "precision=fp16", "half": "precision=fp16",
    "fp32": "precision=fp32", "dtype": "precision", "amp": "precision=bf16",
    "checkpoint": "recompute=full", "checkpointing": "recompute=full", "ac": "recompute=full",
    "cpu_offload": "offload=cpu",
}  # fmt: skip


def field_hint(name: str, value: str, fields: Sequence[str]) -> str:
    """One sentence for a word that is no field."""
    unknown = f"there is no field {name!r}"
    meant = MEANT.get(name) or next(iter(get_close_matches(name, fields, n=1, cutoff=0.6)), None)
    if meant is None:
        return f"{unknown}; the fields are {', '.join(fields)}"
    if "=" not in meant and value:
        meant = f"{meant}={value}"
    return f"{unknown}; did you mean {meant}?"


def value_hint(name: str, value: object, choices: Sequence[int | str], built: Sequence[int | str]) -> str:
    """One sentence for a value that the field does not take: a value that it was meant for, and all that there are."""
    later = [str(choice) for choice in choices if choice not in built]
    known = f"{name} is one of {', '.join(map(str, built))}"
    known += f" (not built yet: {', '.join(later)})" if later else ""
    near = get_close_matches(str(value), [str(choice) for choice in choices], n=1, cutoff=0.6)
    # Other digits are another value, not a slip: fp8 is no fp32.
    if near and not Counter(filter(str.isdigit, str(value))) - Counter(filter(str.isdigit, near[0])):
        return f"{name}={value}: did you mean {name}={near[0]}? {known}"
    return f"{name}={value}: {known}"
