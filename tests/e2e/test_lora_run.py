"""The command of docs/lora.md: an exact run with adapters, its files, and its base."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parents[2]
_RUN = re.compile(r"<!-- run -->\n```sh\n(.*?)```", re.DOTALL)


def _run(index: int, tmp_path: Path) -> tuple[Path, list[dict]]:
    """Execute a command of the page; return the run's folder, and its records of steps 1 and 2, which are exact."""
    command = _RUN.findall((ROOT / "docs" / "lora.md").read_text())[index]
    args = shlex.split(command.replace("\\\n", " "))
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, *args[1:], "--observe.display", "plain"],
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    (run_dir,) = (tmp_path / "runs").iterdir()
    steps = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in steps] == [0, 1, 2]
    for line in steps[1:]:
        assert line["mismatch/abs_logprob_diff/max"] == 0
        assert line["train/grad_norm/max"] > 0
    return run_dir, steps[1:]


def test_the_page_of_adapters_runs_as_written(tmp_path: Path):
    run_dir, _ = _run(0, tmp_path)
    base, trained = (load_file(run_dir / folder / "model.safetensors") for folder in ("warm_start/hf", "hf"))
    adapters = load_file(run_dir / "adapter" / "adapter_model.safetensors")
    assert json.loads((run_dir / "adapter" / "adapter_config.json").read_text())["r"] == 8
    _check_with_vllm(run_dir / "adapter", adapters)
    adapted, moved = 0, 0
    for name, weight in base.items():
        key = f"base_model.model.{name.removesuffix('.weight')}.lora_"
        expected = weight
        if (b := adapters.pop(f"{key}B.weight", None)) is not None:
            product = b.double() @ adapters.pop(f"{key}A.weight").double()
            expected = (weight.double() + 16 / 8 * product).to(torch.bfloat16)
            adapted += 1
            moved += not torch.equal(expected, weight)
        assert torch.equal(trained[name], expected), name
    assert not adapters and adapted == 2 * (4 + 8 * 3)  # q k v o, and gate, up and down of eight experts
    assert moved > 2 * 4  # experts among them; some got no token


@pytest.mark.slow
def test_the_run_without_merging_publishes_adapters_only_and_is_exact(tmp_path: Path):
    run_dir, steps = _run(1, tmp_path)
    adapters = load_file(run_dir / "adapter" / "adapter_model.safetensors")
    assert len(adapters) == 2 * 2 * 4 and any(tensor.any() for name, tensor in adapters.items() if ".lora_B." in name)
    sent = sum(tensor.nbytes for tensor in adapters.values())
    assert [line["publish/bytes/sum"] for line in steps] == [sent] * 2
    assert not (run_dir / "published_adapter").exists()
    base, trained = (load_file(run_dir / folder / "model.safetensors") for folder in ("warm_start/hf", "hf"))
    changed = {name for name, weight in base.items() if not torch.equal(weight, trained[name])}
    assert changed and all(".self_attn." in name and name.endswith("_proj.weight") for name in changed)


def _check_with_vllm(folder: Path, adapters: dict[str, torch.Tensor]) -> None:
    """vLLM's loader of adapters finds every linear, with experts one by one, and its scale alpha / rank."""
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper

    parts = ("gate_proj", "up_proj", "down_proj")
    expected = {"q_proj", "k_proj", "v_proj", "o_proj"} | {f"experts.{i}.{part}" for i in range(8) for part in parts}
    helper = PEFTHelper.from_local_dir(str(folder), 4096)
    loaded = LoRAModel.from_local_checkpoint(str(folder), expected, helper, lora_model_id=1, device="cpu")
    assert len(loaded.loras) == len(adapters) // 2 == 2 * (4 + 8 * 3)
    for name, lora in loaded.loras.items():
        assert lora.scaling == 16 / 8
        assert torch.equal(lora.lora_a, adapters[f"base_model.model.{name}.lora_A.weight"])
        assert torch.equal(lora.lora_b, adapters[f"base_model.model.{name}.lora_B.weight"])
