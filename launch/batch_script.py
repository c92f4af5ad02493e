"""Renders the batch script of a job: Slurm options, one agent per node, and requeueing. Pure.

The agents know whether a checkpoint was saved, so they decide how an attempt ended and write the status to the file
``done``. (The exit status of srun is the largest of all nodes.) 85 requeues the job; any other status ends it. Slurm
itself requeues a job that was preempted or lost a node. If all agents were killed, there is no such file: the job is
queued again, at most twice with the same checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

from launch.outcome import CANCELLED, MAX_FAILURES
from launch.spec import SAVED, JobSpec, launch_dir, submission_dir

if TYPE_CHECKING:
    from launch.cluster import Cluster

ORDER = r"""
# Order nodes by switch, so that neighbours in the job (pipeline stages) are neighbours in the network.
mkdir -p "$notes"
scontrol show hostnames "$SLURM_JOB_NODELIST" > "$notes/nodes"
scontrol show topology 2> /dev/null | sed -nE '/Level=0 |^BlockName=/s/.* Nodes=([^ ]*).*/\1/p' |
    xargs -r -n 1 scontrol show hostnames | grep -Fxf "$notes/nodes" | awk '!seen[$0]++' > "$notes/order"
if [ -s "$notes/order" ] && [ "$(wc -l < "$notes/order")" = "$(wc -l < "$notes/nodes")" ]; then
    export SLURM_HOSTFILE="$notes/order" SLURM_DISTRIBUTION=arbitrary
fi"""
_END_S = 120  # for all agents to end after the first, beside the time to save


@dataclass(frozen=True, kw_only=True)
class Submission:
    """A job on a cluster. Its folder holds script, job file, code and output."""

    spec: JobSpec
    cluster: Cluster
    id: str  # letters, digits, '-' and '_'

    @property
    def folder(self) -> Path:
        return submission_dir(self.spec.run_dir, self.id)

    @property
    def script(self) -> Path:
        return self.folder / "sbatch.sh"

    @property
    def code_dir(self) -> Path:
        return self.folder / "code"


def render(submission: Submission) -> str:
    cluster, folder = submission.cluster, submission.folder
    run = ["srun", '--output="$log"', *srun_options(submission), *ending_options(submission.spec)]
    run += [*map(quote, cluster.srun), quote(cluster.interpreter), "-m", "launch.agent", '"$folder/job.json"']
    parts = [
        "#!/bin/bash",
        "\n".join(f"#SBATCH --{option}" for option in _options(submission)),
        f"\nfolder={quote(str(folder))}",
        'log="$folder/agents-$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}.out"',
        ending(submission.spec),
        ORDER,
        *([f"\n# CLUSTER.setup\n{chr(10).join(cluster.setup)}"] if cluster.setup else []),
        "\n" + " ".join(run),
    ]
    return "\n".join(parts) + "\n"


def ending_options(spec: JobSpec) -> list[str]:
    """Options of srun: agents use all cores of their nodes. If an agent dies, the others save, and end with time."""
    return ["--cpu-bind=none", "--kill-on-bad-exit=0", f"--wait={spec.save_signal_s + _END_S}"]


def srun_options(submission: Submission) -> list[str]:
    """Shell arguments for where the agents run: a container with its mounts, or the code folder."""
    cluster = submission.cluster
    if cluster.container_image is None:
        return ['--chdir="$folder/code"']
    mounts = ",".join([*cluster.container_mounts, *run_mounts(submission)])
    image = quote(f"--container-image={cluster.container_image}")
    return [image, quote(f"--container-mounts={mounts}"), '--container-workdir="$folder/code"']


def run_mounts(submission: Submission) -> list[str]:
    run_dir, root = submission.spec.run_dir, submission.cluster.run_root
    folders = [root] if root else []
    if not (root and Path(run_dir).is_relative_to(root)):
        folders.append(run_dir)
    return [f"{folder}:{folder}" for folder in folders]


def ending(spec: JobSpec) -> str:
    """Shell lines that limit the attempts, and requeue or end the job. ``$folder`` holds the output of the script."""
    text = _ENDING
    for name, value in (
        ("@LAUNCH@", quote(str(launch_dir(spec.run_dir)))),
        ("@RESTARTS@", str(spec.max_restarts)),
        ("@SAVED@", str(SAVED)),
        ("@CANCELLED@", str(CANCELLED)),
        ("@KILLED@", str(MAX_FAILURES)),
    ):
        text = text.replace(name, value)
    return text.rstrip("\n")


def _options(submission: Submission) -> list[str]:
    cluster, spec = submission.cluster, submission.spec
    values = {
        "account": cluster.account,
        "partition": cluster.partition,
        "time": cluster.time_limit,
        "nodes": spec.nodes,
        "ntasks-per-node": 1,
        "cpus-per-task": cluster.cpus_per_node,
        "gpus-per-node": cluster.gpus_per_node or None,
        "signal": f"USR1@{spec.save_signal_s}",
        "job-name": spec.name,
        "output": str(submission.folder / "sbatch-%j.out"),
        "open-mode": "append",
        "requeue": True,
        **{str(name).replace("_", "-"): value for name, value in cluster.sbatch.items()},
    }
    options = sorted((name, value) for name, value in values.items() if value is not None)
    return [name if value is True else f"{name}={quote(str(value))}" for name, value in options]


_ENDING = """
# The agents write the result of an attempt to this folder.
attempt=${SLURM_RESTART_COUNT:-0}
notes=@LAUNCH@/$SLURM_JOB_ID.$attempt
end() {
    status=$?
    trap - EXIT
    mkdir -p "$notes"
    if [ -r "$notes/done" ]; then
        read -r status < "$notes/done"
    elif [ "$status" -gt 133 ] && [ "$status" -lt 140 ]; then
        # All agents were killed, as by SIGKILL, and their roles ended with them.
        echo "the agents were killed: srun ended with status $status" > "$notes/first_error.txt"
        tail -qn 5 "$folder"/*"$SLURM_JOB_ID"*.out >> "$notes/first_error.txt" 2> /dev/null
        cd @LAUNCH@ && ls -d ../checkpoints/step_* ../warm_start/checkpoints/step_* > "$notes/killed" 2> /dev/null
        same=0
        for earlier in "$SLURM_JOB_ID".*/killed; do
            cmp -s "$earlier" "$notes/killed" && same=$((same + 1))
        done
        if [ "$same" -lt @KILLED@ ]; then status=@SAVED@; fi
    fi
    case $status in
        0) ;;
        @SAVED@)
            if [ "$attempt" -ge @RESTARTS@ ]; then
                echo "launch: max_restarts = @RESTARTS@ attempts are used up; submit the run again" >&2
            elif scontrol -o show job "$SLURM_JOB_ID" | grep -q ' JobState=RUNNING '; then
                echo "launch: attempt $attempt ended; the job is queued again from its last checkpoint" >&2
                scontrol requeue "$SLURM_JOB_ID"
            fi ;;
        @CANCELLED@)
            scancel "$SLURM_JOB_ID" ;;  # Slurm's state is then CANCELLED, not FAILED
        *)
            case $status in '' | *[!0-9]*) status=1 ;; esac
            if [ ! -e "$notes/first_error.txt" ]; then
                # No agent wrote an error: use the output of srun and the container.
                tail -qn 40 "$folder"/*"$SLURM_JOB_ID"*.out > "$notes/first_error.txt" 2> /dev/null
                [ -s "$notes/first_error.txt" ] ||
                    echo "no log is left in $folder: was the run's folder moved or removed?" > "$notes/first_error.txt"
            fi ;;
    esac
    exit "$status"
}
trap end EXIT
if [ "$attempt" -gt @RESTARTS@ ]; then
    echo "launch: attempt $attempt is not started: max_restarts = @RESTARTS@" >&2
    exit 1
fi
"""
