"""Logits of transformers' model in float64, from tensors in memory: what a change of a checkpoint does to the function.

In:  the content of a config.json, and tensors by their Hugging Face names.
Out: logits.
Runs on: this process, without GPU; the model needs 16 bytes per weight.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import psutil
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from megatron_fp8rl.data.fused_tensors import fusion_of

_BYTES_PER_WEIGHT = 16  # the tensors and the model
_MEMORY_SHARE = 0.25  # of free memory, which other programs need as well


class _Float64(TorchFunctionMode):
    """Computes in float64 where transformers' code asks for float32: in norms, rotary embeddings and softmax."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        kwargs = {key: _wider(value) for key, value in (kwargs or {}).items()}
        return func(*map(_wider, args), **kwargs)


def _wider(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


def fits(num_weights: int) -> bool:
    """Whether a model of ``num_weights`` takes a small share of free memory."""
    return num_weights * _BYTES_PER_WEIGHT < _MEMORY_SHARE * psutil.virtual_memory().available


def float64_logits(
    config: Mapping[str, Any], read: Callable[[str], Tensor], names: list[str], tokens: Tensor
) -> Tensor:
    """Logits [tokens, vocabulary] of one sequence.

    Args:
        config: content of config.json; ``num_hidden_layers`` may be less than that of the tensors' checkpoint.
        read: returns a tensor by its Hugging Face name.
        names: all tensors of the model.
        tokens: ids of the sequence.
    """
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    kept = {key: value for key, value in config.items() if key not in ("quantization_config", "dtype", "torch_dtype")}
    settings = AutoConfig.for_model(**kept)
    auto_class = AutoModelForCausalLM._model_mapping[type(settings)]
    tensors = fusion_of(settings.model_type).fuse({name: read(name).double() for name in names})
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), torch.no_grad(), _Float64():
            warnings.simplefilter("ignore")
            model = auto_class.from_pretrained(
                None,
                config=settings,
                state_dict=tensors,
                dtype=torch.float64,
                attn_implementation="eager",
                experts_implementation="eager",
            ).eval()
            return model(tokens[None], use_cache=False).logits[0]
    finally:
        logging.disable(logging.NOTSET)
