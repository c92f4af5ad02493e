"""Write the Hugging Face folder for starting engines: config.json and tokenizer files, without weights."""

import json
import shutil
from pathlib import Path

from megatron_fp8rl.config import RunConfig
from megatron_fp8rl.data.checkpoint_dir import errors_name
from megatron_fp8rl.names.registry import to_hf_config


def model_dir(cfg: RunConfig) -> Path:
    """``model.hf_path`` if the run starts from trained weights, otherwise a folder in ``run_dir``."""
    return Path(cfg.model.hf_path) if cfg.model.hf_path is not None else Path(cfg.run_dir) / "model"


def write_model_dir(cfg: RunConfig, folder: Path | None = None) -> Path:
    """Write :func:`model_dir`, or ``folder``, and return its path. A folder in ``model.hf_path`` stays unchanged."""
    if cfg.model.hf_path is not None:
        return model_dir(cfg)
    from megatron_fp8rl.data.tokenizer import load_tokenizer, special_ids  # imports transformers, in seconds

    folder = folder or model_dir(cfg)
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    tokenizer = load_tokenizer(cfg.data.tokenizer)
    tokenizer.save_pretrained(partial)
    config = to_hf_config(cfg.model) | special_ids(tokenizer)
    with errors_name(folder / "config.json"):
        (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
    return folder
