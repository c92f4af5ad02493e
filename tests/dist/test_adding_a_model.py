"""The worked example of docs/extending.md does what the page says: its code makes a family that works."""

import json
import re
from pathlib import Path

import torch

from megatron_fp8rl.names import registry
from tests.helpers.dist import run_ranks
from tests.helpers.hf_parts import to_hf
from tests.helpers.logits import assert_logits_equal, reference_logits, trainer_logits
from tests.tolerances import LOGITS_FLOAT32

PAGE = Path(__file__).parents[2] / "docs" / "extending.md"


def code_for(path: str) -> str:
    """The code block of the page that starts with the file's name."""
    blocks = re.findall(r"```python\n# (\S+)\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (code,) = [code for name, code in blocks if name == path]
    return code


def registered() -> tuple[str, dict]:
    """Register the family of the page in this process; (model type, options of the page's test case)."""
    namespace: dict = {"CASES": {}}
    exec(code_for("megatron_fp8rl/names/seed_oss.py"), namespace)
    exec(code_for("tests/unit/names/test_family_tables.py"), namespace)
    registry.FAMILIES["seed_oss"] = namespace["SEED_OSS"]
    return namespace["CASES"]["seed_oss"]


def convert_and_compare(folder: str) -> dict:
    """Names and logits of a random model of the family, in a process of its own."""
    from safetensors.torch import load_file
    from transformers import AutoConfig

    family, options = registered()
    sizes = dict(
        vocab_size=131,
        hidden_size=48,
        intermediate_size=56,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=20,
        max_position_embeddings=64,
    )
    model = registry.from_hf_config(AutoConfig.for_model(family, **sizes | options).to_dict())
    expected = reference_logits(model, folder)
    saved = json.loads((Path(folder) / "config.json").read_text())
    tensors = load_file(Path(folder) / "model.safetensors")
    back: dict[str, torch.Tensor] = {}
    for name in registry.weights(model):
        back |= dict(to_hf(name, registry.from_hf(name, tensors.__getitem__, model), model))
    logits = trainer_logits(model, dict(world_size=1), folder)
    return {
        "qkv_bias": model.qkv_bias,
        "same_config": registry.from_hf_config(saved) == model,
        "same_tensors": back.keys() == tensors.keys() and all(torch.equal(back[n], t) for n, t in tensors.items()),
        "expected": expected,
        "logits": logits,
    }


def test_the_family_of_the_page_works(tmp_path):
    (result,) = run_ranks(1, convert_and_compare, str(tmp_path))
    assert result["qkv_bias"] and result["same_config"] and result["same_tensors"]
    assert_logits_equal(result["logits"], result["expected"], **LOGITS_FLOAT32)
