"""A random folder of Gemma 3 that also sees images, as it is published."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import Gemma3Config, Gemma3ForConditionalGeneration

# What transformers assumes is left out, as on the hub: 8 heads of 256, 4 of keys. Windows of 8 tokens, and the query
# scale of 27B, which is not a head's.
TEXT: dict[str, Any] = {
    "model_type": "gemma3_text",
    "vocab_size": 384,
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_hidden_layers": 6,
    "sliding_window": 8,
    "query_pre_attn_scalar": 168,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
}
VISION = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 1, "num_attention_heads": 4}
VISION |= {"image_size": 28, "patch_size": 14, "vision_use_head": False}
_SAVED = "language_model.model."


def published(folder: Path, prefix: str = _SAVED, **keys: Any) -> None:
    """Write BF16 weights, and config.json as on the hub with further ``keys``. ``prefix`` begins the names of the text
    part: that of the hub, which transformers saves, or that of transformers' own modules."""
    torch.manual_seed(0)
    whole = {"text_config": TEXT, "vision_config": VISION, "mm_tokens_per_image": 4}
    model = Gemma3ForConditionalGeneration(Gemma3Config(**json.loads(json.dumps(whole))))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # A larger embedding would make every token predict itself, because the head is tied to it.
            width = 0.3 if parameter.ndim == 1 else parameter.shape[-1] ** -0.5
            parameter.normal_(0.0, 0.08 if "embed_tokens" in name else width)
    model.bfloat16().save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    assert f"{_SAVED}norm.weight" in tensors
    if prefix != _SAVED:
        tensors = {
            prefix + name.removeprefix(_SAVED) if name.startswith(_SAVED) else f"model.{name}": tensor
            for name, tensor in tensors.items()
        }
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    more = {"eos_token_id": [1, 106], "boi_token_index": 120, "eoi_token_index": 121, "image_token_index": 122}
    config = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config | whole | more | keys))
