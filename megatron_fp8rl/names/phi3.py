"""Phi-3, Phi-3.5, Phi-4 and Phi-4-mini: Llama's layers, with rotated parts of heads and longrope in some releases.

A checkpoint stores queries, keys and values of a layer in one tensor, and gate and up in another; the names of this
table are those of single matrices (``data/fused_rows.py``).
"""

from typing import Any

from megatron_fp8rl.config import ModelConfig
from megatron_fp8rl.names import blocks
from megatron_fp8rl.names.family import DENSE, Family


def _complete(config: dict[str, Any]) -> dict[str, Any]:
    """Without a window that no sequence fills, and without the original length where nothing scales positions."""
    config = dict(config)
    kinds = set()
    for key in ("rope_parameters", "rope_scaling"):
        if isinstance(rope := config.get(key), dict):
            kind = rope.get("rope_type") or rope.get("type") or "default"
            kinds.add(kind)
            if kind == "su":  # the name of longrope in early releases
                config[key] = rope | {"rope_type": "longrope"}
    if kinds <= {"default"}:
        config.pop("original_max_position_embeddings", None)
    else:
        config.setdefault("original_max_position_embeddings", 4096)
    window, longest = config.get("sliding_window"), config.get("max_position_embeddings")
    if isinstance(window, int) and isinstance(longest, int) and window >= longest:
        config["sliding_window"] = None
    return config


def _original_length(model: ModelConfig) -> int:
    scaling = model.rope_scaling
    return model.max_position_embeddings if scaling is None else scaling.original_max_position_embeddings


PHI3 = Family(
    model_type="phi3",
    architecture="Phi3ForCausalLM",
    rows=blocks.decoder,
    fields=DENSE | {"sliding_window": "sliding_window"},
    fixed={"attention_bias": False},
    defaults={"sliding_window": None},
    rope_scalings=("longrope",),
    rotary_fraction=1.0,
    complete=_complete,
    derived={"original_max_position_embeddings": ("rope_parameters", _original_length)},
    written={"pad_token_id": None},  # transformers' default is larger than a small vocabulary
    for_engines=("sliding_window",),
    fused_rows=True,
    derives_head_dim=True,
)
