"""Processes of roles, without an agent."""

from pathlib import Path

from launch.peers import Board, Peer, Place
from launch.roles import RoleProcess
from launch.spec import JobSpec, Role


def process_of(folder: Path, *, num_nodes: int = 2, **env: str) -> RoleProcess:
    place = Place(job="7", attempt=0, node=0, num_nodes=num_nodes, is_slurm=False)
    role = Role(name="rollout-0", kind="replica", nodes=(0,), command=("-c", "pass"))
    spec = JobSpec(name="fake", run_dir=str(folder), roles=(role,), nodes=num_nodes, env=env)
    return RoleProcess(role, spec, Board(folder, place), {0: Peer(host="h", address="127.0.0.1", port=1, pid=1)})
