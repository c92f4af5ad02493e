"""Small checkpoints of random weights: by transformers, or straight from the name table."""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

from megatron_fp8rl.config import ModelConfig
from megatron_fp8rl.data.model_files import read_entries
from megatron_fp8rl.data.safetensors_file import Files
from megatron_fp8rl.names import registry


def save_with_transformers(model: ModelConfig, folder: Path, dtype: torch.dtype, max_shard_size: str = "5GB") -> Path:
    """A random checkpoint by transformers; norms and biases differ from their initial values."""
    import transformers

    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**registry.to_hf_config(model))
    reference = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in (*reference.parameters(), *reference.buffers()):
            parameter.normal_(0.0, 0.3)
    reference.to(dtype).save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


def random_tensors(model: ModelConfig, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> dict[str, torch.Tensor]:
    """Tensors of a checkpoint; copies of one Megatron parameter are equal."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for weight in registry.weights(model).values():
        for name, shape in weight.parts:
            tensors[name] = torch.randn(shape, generator=generator).to(dtype)
        tensors |= {copy: tensors[weight.parts[0][0]].clone() for copy in weight.copies}
    return tensors


def write_folder(folder: Path, tensors: Mapping[str, torch.Tensor], config: Mapping, num_files: int = 2) -> Path:
    """A Hugging Face folder of these tensors, divided over files, with an index."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    where = {}
    for index in range(num_files):
        file = f"model-{index + 1:05d}-of-{num_files:05d}.safetensors"
        part = list(tensors)[index::num_files]
        save_file({name: tensors[name].contiguous() for name in part}, folder / file)
        where |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return folder


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    entries, problems, _ = read_entries(folder)
    assert not problems, problems
    files = Files()
    tensors = {name: files.rows(entry) for name, entry in entries.items()}
    files.close()
    return tensors


def assert_same_tensors(actual: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    """Compare names, types and bits."""
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype, name
        assert torch.equal(actual[name], tensor), name


def write_hf(folder: Path) -> Path:
    """A folder that looks like a Hugging Face checkpoint."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"")
    return folder


def write_checkpoint(folder: Path, step: int, **config: object) -> Path:
    """A folder that looks like a complete checkpoint of a run; ``folder``: that of the run's checkpoints."""
    path = folder / f"step_{step:08d}"
    path.mkdir(parents=True)
    (path / ".metadata").write_bytes(b"12345")
    (path / "state.json").write_text(json.dumps({"step": step, "files": {".metadata": 5}, "config": config}))
    return path
