"""This machine without Slurm: roles are local processes, for first runs and tests. ``--nodes 2`` starts two agents."""

import os
import shutil
import subprocess

from launch.cluster import Cluster


def _gpu_names() -> list[str]:
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, timeout=60)
    return done.stdout.split("\n")[:-1] if done.returncode == 0 else []


_NAMES = _gpu_names()
_KIND = next((kind for kind in ("h100", "h200", "b200") if _NAMES and kind in _NAMES[0].lower()), "h100")

CLUSTER = Cluster(
    kind="local",
    gpu=_KIND if _NAMES else None,
    gpus_per_node=len(_NAMES),
    ranks_per_node=None if _NAMES else 2 * (os.cpu_count() or 1),
    max_nodes=1 if _NAMES else None,  # all GPUs belong to one node
    max_restarts=3,
)
