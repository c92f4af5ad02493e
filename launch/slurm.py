"""A job on Slurm: its batch script as text, its submission, and the wait for its end.

In: a :class:`~launch.spec.JobSpec` and a cluster. Out: text, or the number of a job that runs whether this process lives
or not. Slurm's own commands are asked, with accounting or without.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import megatron_fp8rl
from launch.batch_script import Submission, render
from launch.spec import JobSpec, add_job
from megatron_fp8rl.envs.rewards.functions import COPIES

if TYPE_CHECKING:
    from launch.cluster import Cluster

_ROOT = Path(__file__).parents[1]
_OWN = "own"  # folder of copies of the user's files
_PACKAGES = ("launch", "megatron_fp8rl", "model_configs", "checkpoint_tools")
_COMMAND_DEADLINE_S = 60.0
_SILENCE_S = 600.0  # without an answer of Slurm, after which a wait ends
_POLL_S = 5.0
_HELD_S = 2.0  # after which Slurm says why a job may never start
# What overrules a batch script in the environment of sbatch, and the field of CLUSTER that it would overrule.
_OVERRULING = {"SBATCH_ACCOUNT": "account", "SBATCH_PARTITION": "partition", "SBATCH_TIMELIMIT": "time_limit"}
# Reasons of a pending job that no waiting changes.
_NEVER = {
    "PartitionTimeLimit": "CLUSTER.time_limit is above the partition's",
    "PartitionNodeLimit": "the partition has too few nodes for one job: use fewer --nodes",
    "AccountNotAllowed": "CLUSTER.account may not use this partition",
    "InvalidAccount": "CLUSTER.account is not known",
    "InvalidQOS": "CLUSTER.sbatch['qos'] is not known",
    "QOSNotAllowed": "CLUSTER.sbatch['qos'] may not be used here",
    "QOSMaxWallDurationPerJobLimit": "CLUSTER.time_limit is above the QOS's",
    "AssocMaxWallDurationPerJobLimit": "CLUSTER.time_limit is above the account's",
}
# Reasons that a drained node causes, too.
_PERHAPS_NEVER = {
    "PartitionConfig": "the partition cannot run it now: compare CLUSTER with `scontrol show partition`",
    "BadConstraints": "no node has what is asked for now: compare CLUSTER with `sinfo -o '%n %c %m %G %f'`",
}
_REMEDIES = (
    (r"account", "CLUSTER.account", "`sacctmgr show associations user=$USER format=account,partition` lists yours"),
    (r"partition", "CLUSTER.partition", "`sinfo -s` lists partitions"),
    (r"qos", "CLUSTER.sbatch['qos']", "`sacctmgr show qos format=name` lists them"),
    (r"time limit", "CLUSTER.time_limit", "`sinfo -o '%P %l'` lists limits"),
    (r"gres|gpu", "CLUSTER.gpus_per_node", "`sinfo -o '%n %G'` lists the GPUs of nodes"),
    (r"node count|node configuration|nodes", "--nodes", "`sinfo -o '%P %D %c %m %G'` lists what nodes have"),
)


class SubmitError(RuntimeError):
    """Slurm did not take the job. The message holds what it said, and which field it is about."""


def new_id(spec: JobSpec, *, now: Callable[[], float] = time.time) -> str:
    """A name for one submission: letters, digits, '-' and one '_'."""
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(now()))
    return f"{slug(spec.name)}_{stamp}-{int(now() * 1000) % 1000:03d}"


def slug(name: str) -> str:
    """A name without anything that a shell, a path or nemo-run reads."""
    return re.sub(r"[^A-Za-z0-9-]+", "-", name).strip("-")[:60] or "job"


def problems(spec: JobSpec, cluster: Cluster) -> list[str]:
    """What Slurm would get wrong, each in one sentence with what to do."""
    found = list(spec.problems())
    marks = {"%": "Slurm replaces what follows it", "\\": "Slurm reads it as an escape", "\n": "it ends a line"}
    for mark, why in marks.items():
        if mark in spec.run_dir:
            found.append(f"the run's folder = {spec.run_dir!r} holds {mark!r}: {why}. Choose another --output_dir.")
    for variable, name in _OVERRULING.items():
        said, value = os.environ.get(variable), getattr(cluster, name)
        if said is not None and value is not None and said != value:
            found.append(f"{variable} = {said!r} of this shell would overrule CLUSTER.{name} = {value!r}. Unset it.")
    if cluster.container_image is not None and re.search(r"[:,]", spec.run_dir + (cluster.run_root or "")):
        found.append(f"the run's folder = {spec.run_dir!r} holds ':' or ',', which pyxis cannot mount. Choose another.")
    return found


def dry_run(spec: JobSpec, cluster: Cluster, *, id: str | None = None) -> str:
    """The complete batch script. Needs no Slurm; the same text for the same id."""
    return render(_submission(spec, cluster, id or f"{slug(spec.name)}_dry-run"))


def submit(spec: JobSpec, cluster: Cluster, *, cluster_name: str, id: str | None = None) -> str:
    """Queue the job and return its number at once. Raises SubmitError, and leaves nothing queued then."""
    if shutil.which("sbatch") is None:
        raise SubmitError(
            f"cluster {cluster_name!r}: this machine has no sbatch. Run this on a login node, or use --cluster local "
            "or --dry-run"
        )
    submission = _submission(spec, cluster, id or new_id(spec))
    if submission.folder.exists():
        raise SubmitError(
            f"there is a submission {submission.id!r} already in {submission.folder}: choose another --id"
        )
    job_id = None
    try:
        write(submission)
        submission.script.write_text(render(submission), encoding="utf-8")
        job_id = _sbatch(submission.script, cluster, cluster_name)
        add_job(spec.run_dir, _record(submission, job_id, cluster_name))
        _reject_impossible(job_id, cluster_name)
    except BaseException as error:  # an interrupt too: no job stays of which its user was not told
        if job_id is not None:
            slurm_output("scancel", job_id)
        shutil.rmtree(submission.folder, ignore_errors=True)
        if isinstance(error, OSError):
            raise SubmitError(f"the run's folder {spec.run_dir!r} cannot be written: {error}") from error
        raise
    return job_id


def write(submission: Submission) -> None:
    """Write all that the agents read: the code and the job."""
    copy_code(submission.code_dir, submission.spec.own_files, submission.spec.own_modules)
    submission.spec.save(submission.folder / "job.json")


def with_code(submission: Submission) -> Submission:
    """With the copied code first on every role's PYTHONPATH."""
    spec, code = submission.spec, str(submission.code_dir)
    inherited = spec.env.get("PYTHONPATH")
    env = {**spec.env, "PYTHONPATH": f"{code}:{inherited}" if inherited else code, COPIES: f"{code}/{_OWN}"}
    return dataclasses.replace(submission, spec=dataclasses.replace(spec, env=env))


def _submission(spec: JobSpec, cluster: Cluster, id: str) -> Submission:
    return with_code(Submission(spec=spec, cluster=cluster, id=id))


def _sbatch(script: Path, cluster: Cluster, cluster_name: str) -> str:
    """Queue a script; the number of the job. Raises SubmitError with what Slurm said."""
    try:
        done = subprocess.run(
            ["sbatch", "--parsable", str(script)],
            capture_output=True,
            text=True,
            timeout=_COMMAND_DEADLINE_S,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired as error:
        raise SubmitError(f"cluster {cluster_name!r}: sbatch gave no answer within {error.timeout:g} s") from error
    if done.returncode:
        raise SubmitError(f"cluster {cluster_name!r}: {_submit_error_text(done.stderr, cluster)}")
    return done.stdout.strip().splitlines()[-1].partition(";")[0]  # in a federation "123;name"


def _record(submission: Submission, job_id: str, cluster_name: str) -> dict[str, Any]:
    """The line of a job in the run's file of jobs."""
    return {
        "job_id": job_id,
        "cluster": cluster_name,
        "kind": "slurm",
        "name": submission.spec.name,
        "nodes": submission.spec.nodes,
        "submitted_at": time.time(),
        "folder": str(submission.folder),
        "script": str(submission.script),
        "spec": str(submission.folder / "job.json"),
    }


def copy_code(folder: Path, own_files: Sequence[str] = (), own_modules: Sequence[str] = ()) -> None:
    """Keep this code and the user's as they are: a job that waits for days, or starts again, must not run what is edited
    meanwhile."""
    folder.mkdir(parents=True)
    ignore = shutil.ignore_patterns("__pycache__", "*.pyc", "*.egg-info")
    roots = {"megatron_fp8rl": Path(megatron_fp8rl.__file__).parents[1]}  # elsewhere, when installed
    for package in _PACKAGES:
        shutil.copytree(roots.get(package, _ROOT) / package, folder / package, ignore=ignore)
    for name in ("requirements.toml",):
        if (_ROOT / name).is_file():
            shutil.copy(_ROOT / name, folder / name)
    for module in map(Path, own_modules):
        if module.is_dir():
            shutil.copytree(module, folder / module.name, ignore=ignore, dirs_exist_ok=True)
        else:
            shutil.copy(module, folder / module.name)
    for file in own_files:
        target = folder / _OWN / file.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, target)


def wait(job_ids: Sequence[str], *, poll_s: float = _POLL_S) -> dict[str, str]:
    """The last state of each job, once all have ended. Asks Slurm, with accounting or without.

    However long they queue and run; but Slurm may be silent for 10 minutes at most, which raises SubmitError.
    """
    states: dict[str, str] = {}
    last_answer = time.monotonic()
    while len(states) < len(job_ids):
        for job_id in job_ids:
            if job_id in states:
                continue
            state = job_state(job_id)
            if state is not None:
                last_answer = time.monotonic()
                if is_over(state):
                    states[job_id] = state
        if time.monotonic() - last_answer > _SILENCE_S:
            unknown = ", ".join(job_id for job_id in job_ids if job_id not in states)
            raise SubmitError(f"Slurm has said nothing about job {unknown} for {_SILENCE_S:.0f} s; it may still run")
        if len(states) < len(job_ids):
            time.sleep(poll_s)
    return {job_id: states[job_id] for job_id in job_ids}


def job_state(job_id: str) -> str | None:
    """Slurm's word for the state of a job; None when nobody answers."""
    shown = slurm_output("scontrol", "-o", "show", "job", job_id)
    found = re.findall(r"\bJobState=(\w+)", shown or "")
    if not found:
        accounted = slurm_output("sacct", "-X", "-n", "-P", "-o", "State", "-j", job_id)
        found = [line.split()[0] for line in (accounted or "").splitlines() if line.split()]
    return found[0] if found else None


def is_over(state: str) -> bool:
    """Whether a job in this state will never run again."""
    waiting = {"PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "CONFIGURING", "SPECIAL_EXIT", "RESV_DEL_HOLD"}
    working = {"RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "RESIZING", "SIGNALING", "STAGE_OUT"}
    return state not in waiting | working


def _reject_impossible(job_id: str, cluster_name: str) -> None:
    """Raise SubmitError for a job that Slurm has queued and calls impossible; warn where nodes may only be drained."""
    time.sleep(_HELD_S)
    reason = (slurm_output("squeue", "-h", "-o", "%r", "-j", job_id) or "").strip()
    if reason in _NEVER:
        raise SubmitError(
            f"cluster {cluster_name!r}: Slurm would never start job {job_id} ({reason}): {_NEVER[reason]}. It is cancelled"
        )
    if reason in _PERHAPS_NEVER:
        print(f"warning: job {job_id} waits ({reason}): {_PERHAPS_NEVER[reason]}", file=sys.stderr)


def slurm_output(*args: str, deadline_s: float = _COMMAND_DEADLINE_S) -> str | None:
    """Output of one of Slurm's commands on this machine; None when it fails, is missing, or does not answer."""
    try:
        done = subprocess.run(args, capture_output=True, text=True, timeout=deadline_s, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _submit_error_text(stderr: str, cluster: Cluster) -> str:
    """The errors of sbatch, and the field that they are about."""
    said = [line.strip() for line in stderr.splitlines() if "error" in line.lower()] or stderr.strip().splitlines()[-3:]
    shown = "; ".join(said) or "sbatch failed and said nothing"
    values = {
        "CLUSTER.account": cluster.account,
        "CLUSTER.partition": cluster.partition,
        "CLUSTER.time_limit": cluster.time_limit,
        "CLUSTER.gpus_per_node": cluster.gpus_per_node,
    }
    hints = [
        f"{field}{f' = {values[field]!r}' if field in values else ''}: {remedy}"
        for pattern, field, remedy in _REMEDIES
        if re.search(pattern, shown, re.IGNORECASE)
    ]
    return "\n  ".join([f"Slurm refused the job: {shown}", *hints])
