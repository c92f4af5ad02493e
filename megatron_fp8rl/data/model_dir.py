"""Write the Hugging Face folder for starting engines: config.json and tokenizer files, without weights."""

import json
import shutil
from pathlib import Path

from megatron_fp8rl.config import RunConfig
from megatron_fp8rl.data.checkpoint_dir import errors_name
from megatron_fp8rl.data.weight_files import copy_tokenizer
from megatron_fp8rl.names import registry


def model_dir(cfg: RunConfig) -> Path:
    """``model.hf_path`` if its config.json is that of the run's model, otherwise a folder in ``run_dir``: of a run from
    random weights, or of the text part of a model that also sees images."""
    return Path(cfg.run_dir) / "model" if cfg.model.hf_path is None or _sees_images(cfg) else Path(cfg.model.hf_path)


def write_model_dir(cfg: RunConfig, folder: Path | None = None) -> Path:
    """Write :func:`model_dir`, or ``folder``, and return its path. A folder in ``model.hf_path`` stays unchanged."""
    if model_dir(cfg) == Path(cfg.model.hf_path or ""):
        return model_dir(cfg)
    from megatron_fp8rl.data.tokenizer import load_tokenizer, special_ids  # imports transformers, in seconds

    folder = folder or model_dir(cfg)
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    tokenizer = load_tokenizer(cfg.model.hf_path or cfg.data.tokenizer)
    if cfg.model.hf_path is None:
        tokenizer.save_pretrained(partial)
    else:
        copy_tokenizer(Path(cfg.model.hf_path), partial)
    config = registry.to_hf_config(cfg.model) | special_ids(tokenizer)
    with errors_name(folder / "config.json"):
        (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
    return folder


def _sees_images(cfg: RunConfig) -> bool:
    file = Path(cfg.model.hf_path or "", "config.json")
    return file.is_file() and registry.sees_images(json.loads(file.read_text()))
