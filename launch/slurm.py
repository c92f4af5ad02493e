"""Submits jobs to Slurm and reads their states. Uses Slurm's commands; accounting is optional."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import megatron_fp8rl
from launch.batch_script import Submission, render
from launch.spec import JobSpec, record_job, remove_job
from megatron_fp8rl.envs.rewards.functions import COPIES

if TYPE_CHECKING:
    from launch.cluster import Cluster

_ROOT = Path(__file__).parents[1]
_COPIES = "own"  # folder of the copied user files
PACKAGES = ("launch", "megatron_fp8rl", "model_configs", "checkpoint_tools")  # of this code
INSTALLED = frozenset(("site-packages", "dist-packages"))  # folders of installed modules
_COMMAND_DEADLINE_S = 60.0
_SILENCE_S = 600.0  # a wait ends after this time without an answer from Slurm
_POLL_S = 5.0
_REASON_S = 2.0  # Slurm then knows why a job is pending
# Environment variables of sbatch that override the script, and their fields of CLUSTER.
_OVERRIDES = {"SBATCH_ACCOUNT": "account", "SBATCH_PARTITION": "partition", "SBATCH_TIMELIMIT": "time_limit"}
# Pending reasons that never change.
_NEVER = {
    "PartitionTimeLimit": "CLUSTER.time_limit is above the partition's",
    "PartitionNodeLimit": "the partition has too few nodes for one job: use fewer --nodes",
    "AccountNotAllowed": "CLUSTER.account may not use this partition",
    "InvalidAccount": "CLUSTER.account is unknown",
    "InvalidQOS": "CLUSTER.sbatch['qos'] is unknown",
    "QOSNotAllowed": "CLUSTER.sbatch['qos'] is not allowed here",
    "QOSMaxWallDurationPerJobLimit": "CLUSTER.time_limit is above the QOS's",
    "AssocMaxWallDurationPerJobLimit": "CLUSTER.time_limit is above the account's",
}
# Pending reasons that a drained node also causes.
_PERHAPS_NEVER = {
    "PartitionConfig": "the partition cannot run it now: compare CLUSTER with `scontrol show partition`",
    "BadConstraints": "no node satisfies the request now: compare CLUSTER with `sinfo -o '%n %c %m %G %f'`",
}
# The first pattern that matches Slurm's error names the field.
_REMEDIES = (
    (
        r"QOS policy",
        "CLUSTER.sbatch['qos']",
        "a limit of the QOS or account is reached; `sacctmgr show qos` lists limits",
    ),
    (
        r"invalid account",
        "CLUSTER.account",
        "`sacctmgr show associations user=$USER format=account,partition` lists yours",
    ),
    (r"invalid qos", "CLUSTER.sbatch['qos']", "`sacctmgr show qos format=name` lists them"),
    (r"partition", "CLUSTER.partition", "`sinfo -s` lists partitions"),
    (r"time limit|time specification", "CLUSTER.time_limit", "`sinfo -o '%P %l'` lists limits"),
    (r"gres|generic resource|gpu", "CLUSTER.gpus_per_node", "`sinfo -o '%n %G'` lists the GPUs of nodes"),
    (r"memory", "CLUSTER.sbatch['mem']", "`sinfo -o '%n %m'` lists the memory of nodes in MB"),
    (r"cpu count|processors", "CLUSTER.cpus_per_node", "`sinfo -o '%n %c'` lists the CPUs of nodes"),
    (r"feature", "CLUSTER.sbatch['constraint']", "`sinfo -o '%n %f'` lists features"),
    (r"reservation", "CLUSTER.sbatch['reservation']", "`scontrol show reservation` lists them"),
    (r"dependency", "CLUSTER.sbatch['dependency']", "`squeue --me` lists your jobs"),
    (r"unrecognized option|invalid option|requires an argument", "CLUSTER.sbatch", "`sbatch --help` lists options"),
    (r"node count|node configuration|nodes", "--nodes", "`sinfo -o '%P %D %c %m %G'` lists what nodes have"),
)


class SubmitError(RuntimeError):
    """Slurm rejected the job. The message contains Slurm's error and the field that caused it."""


def new_id(spec: JobSpec, *, now: Callable[[], float] = time.time) -> str:
    """A unique submission name: letters, digits, '-' and one '_'."""
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(now()))
    return f"{slug(spec.name)}_{stamp}-{int(now() * 1000) % 1000:03d}"


def slug(name: str) -> str:
    """The name without characters that a shell, a path or nemo-run interprets."""
    return re.sub(r"[^A-Za-z0-9-]+", "-", name).strip("-")[:60] or "job"


def problems(spec: JobSpec, cluster: Cluster) -> list[str]:
    """Problems of the job with Slurm, one sentence each with a remedy."""
    errors = list(spec.problems())
    marks = {"%": "Slurm expands it", "\\": "Slurm reads it as an escape", "\n": "it ends a line"}
    folder = f"the run's folder = {spec.run_dir!r} contains"
    for mark, why in marks.items():
        if mark in spec.run_dir:
            errors.append(f"{folder} {mark!r}: {why}. Choose another --output_dir.")
    for variable, name in _OVERRIDES.items():
        override, value = os.environ.get(variable), getattr(cluster, name)
        if override is not None and value is not None and override != value:
            errors.append(f"{variable} = {override!r} in this shell overrides CLUSTER.{name} = {value!r}. Unset it.")
    if cluster.container_image is not None and re.search(r"[:,]", spec.run_dir + (cluster.run_root or "")):
        errors.append(f"{folder} ':' or ',', which pyxis cannot mount. Choose another.")
    return errors


def dry_run(spec: JobSpec, cluster: Cluster, *, id: str | None = None) -> str:
    """The complete batch script. Needs no Slurm; the text depends only on the arguments."""
    return render(_submission(spec, cluster, id or f"{slug(spec.name)}_dry-run"))


def submit(spec: JobSpec, cluster: Cluster, *, cluster_name: str, id: str | None = None) -> str:
    """Queue the job and return its number. Raises SubmitError, and then leaves nothing queued."""
    if shutil.which("sbatch") is None:
        raise SubmitError(
            f"cluster {cluster_name!r}: this machine has no sbatch. Run this on a login node, or use --cluster local "
            "or --dry-run"
        )
    submission = _submission(spec, cluster, id or new_id(spec))
    if submission.folder.exists():
        raise SubmitError(f"submission {submission.id!r} already exists in {submission.folder}: choose another --id")
    try:
        with removed_on_error(submission):
            write(submission)
            submission.script.write_text(render(submission), encoding="utf-8")
            job_id = _sbatch(submission.script, cluster, cluster_name)
            folder, script = str(submission.folder), str(submission.script)
            files = {"folder": folder, "script": script, "file": f"{folder}/job.json"}
            try:
                record_job(spec, job_id=job_id, cluster=cluster_name, kind="slurm", **files)
                _reject_impossible(job_id, cluster_name)
            except BaseException:  # also an interrupt: do not leave a job that the user does not know about
                slurm_output("scancel", job_id)
                with contextlib.suppress(OSError):
                    remove_job(spec.run_dir, job_id)
                raise
    except OSError as error:
        raise SubmitError(f"the run's folder {spec.run_dir!r} cannot be written: {error}") from error
    return job_id


@contextlib.contextmanager
def removed_on_error(submission: Submission) -> Iterator[None]:
    """After an error, remove the submission's folder, and its parents that did not exist before."""
    kept = next(parent for parent in submission.folder.parents if parent.exists())
    try:
        yield
    except BaseException:
        shutil.rmtree(submission.folder, ignore_errors=True)
        with contextlib.suppress(OSError):  # a parent has files of others
            for parent in itertools.takewhile(lambda parent: parent != kept, submission.folder.parents):
                parent.rmdir()
        raise


def write(submission: Submission) -> None:
    copy_code(submission.code_dir, submission.spec.user_files, submission.spec.user_modules)
    submission.spec.save(submission.folder / "job.json")


def with_code(submission: Submission) -> Submission:
    spec, code = submission.spec, str(submission.code_dir)
    inherited = spec.env.get("PYTHONPATH")
    files = {COPIES: f"{code}/{_COPIES}", f"{COPIES}_FROM": os.getcwd()}
    env = {**spec.env, "PYTHONPATH": f"{code}:{inherited}" if inherited else code, **files}
    return dataclasses.replace(submission, spec=dataclasses.replace(spec, env=env))


def _submission(spec: JobSpec, cluster: Cluster, id: str) -> Submission:
    return with_code(Submission(spec=spec, cluster=cluster, id=id))


def _sbatch(script: Path, cluster: Cluster, cluster_name: str) -> str:
    """Queue a script and return the job number. Raises SubmitError with Slurm's error."""
    try:
        done = subprocess.run(
            ["sbatch", "--parsable", str(script)],
            capture_output=True,
            text=True,
            timeout=_COMMAND_DEADLINE_S,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired as error:
        raise SubmitError(f"cluster {cluster_name!r}: sbatch did not answer within {error.timeout:g} s") from error
    if done.returncode:
        raise SubmitError(f"cluster {cluster_name!r}: {_submit_error_text(done.stderr, cluster)}")
    return done.stdout.strip().splitlines()[-1].partition(";")[0]  # in a federation "123;name"


def copy_code(folder: Path, user_files: Sequence[str] = (), user_modules: Sequence[str] = ()) -> None:
    """Copy this code and the user's files, so that later edits do not change a queued or requeued job."""
    folder.mkdir(parents=True)
    ignore = shutil.ignore_patterns("__pycache__", "*.pyc", "*.egg-info")
    roots = {"megatron_fp8rl": Path(megatron_fp8rl.__file__).parents[1]}  # elsewhere, when installed
    for package in PACKAGES:
        shutil.copytree(roots.get(package, _ROOT) / package, folder / package, ignore=ignore)
    if (_ROOT / "requirements.toml").is_file():
        shutil.copy(_ROOT / "requirements.toml", folder)
    for module in map(Path, user_modules):
        if (module / "__init__.py").is_file():
            shutil.copytree(module, folder / module.name, ignore=ignore, dirs_exist_ok=True)
        else:  # a file, or a folder of modules, whose other files may be large
            for file in python_files(module) if module.is_dir() else [module]:
                target = folder / file.relative_to(module.parent)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(file, target)
    for file in user_files:
        target = folder / _COPIES / file.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, target)


def python_files(folder: Path) -> Iterator[Path]:
    """Python files below a folder, without hidden folders and installed modules."""
    for parent, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if name[0] != "." and name not in INSTALLED | {"__pycache__"})
        yield from (Path(parent, name) for name in sorted(files) if name.endswith(".py"))


def wait(job_ids: Sequence[str], *, poll_s: float = _POLL_S) -> dict[str, str]:
    """Wait until all jobs have ended; returns their states. Raises SubmitError after 10 minutes without an answer."""
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
            raise SubmitError(f"no answer from Slurm about job {unknown} for {_SILENCE_S:.0f} s; it may still run")
        if len(states) < len(job_ids):
            time.sleep(poll_s)
    return {job_id: states[job_id] for job_id in job_ids}


def job_state(job_id: str) -> str | None:
    """Slurm's state of a job; None without an answer."""
    shown = slurm_output("scontrol", "-o", "show", "job", job_id)
    states = re.findall(r"\bJobState=(\w+)", shown or "")
    if not states:
        accounted = slurm_output("sacct", "-X", "-n", "-P", "-o", "State", "-j", job_id)
        states = [line.split()[0] for line in (accounted or "").splitlines() if line.split()]
    return states[0] if states else None


def has_other_nodes() -> bool:
    """Whether Slurm has nodes beside this machine; False without an answer."""
    here = socket.gethostname().partition(".")[0]
    names = (slurm_output("sinfo", "-h", "-N", "-o", "%N") or "").split()
    return any(name.partition(".")[0] != here for name in names)


def is_over(state: str) -> bool:
    """Whether a job in this state never runs again."""
    waiting = {"PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "CONFIGURING", "SPECIAL_EXIT", "RESV_DEL_HOLD"}
    working = {"RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "RESIZING", "SIGNALING", "STAGE_OUT"}
    return state not in waiting | working


def _reject_impossible(job_id: str, cluster_name: str) -> None:
    """Raise SubmitError if Slurm can never start a queued job; warn if nodes may only be drained."""
    time.sleep(_REASON_S)
    reason = (slurm_output("squeue", "-h", "-o", "%r", "-j", job_id) or "").strip()
    if reason in _NEVER:
        problem = f"Slurm would never start job {job_id} ({reason}): {_NEVER[reason]}"
        raise SubmitError(f"cluster {cluster_name!r}: {problem}. The job is cancelled")
    if reason in _PERHAPS_NEVER:
        print(f"warning: job {job_id} waits ({reason}): {_PERHAPS_NEVER[reason]}", file=sys.stderr)


def slurm_output(*args: str, deadline_s: float = _COMMAND_DEADLINE_S) -> str | None:
    """Output of a Slurm command on this machine; None if it fails, is missing, or does not answer."""
    try:
        done = subprocess.run(args, capture_output=True, text=True, timeout=deadline_s, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _submit_error_text(stderr: str, cluster: Cluster) -> str:
    errors = [line.strip() for line in stderr.splitlines() if re.search(r"error|option", line, re.IGNORECASE)]
    shown = "; ".join(errors or stderr.strip().splitlines()[-3:]) or "sbatch failed without a message"
    values = {
        "CLUSTER.account": cluster.account,
        "CLUSTER.partition": cluster.partition,
        "CLUSTER.time_limit": cluster.time_limit,
        "CLUSTER.gpus_per_node": cluster.gpus_per_node,
    }
    matching = (hint for hint in _REMEDIES if re.search(hint[0], shown, re.IGNORECASE))
    hints = [
        f"{field}{f' = {values[field]!r}' if field in values else ''}: {remedy}"
        for _, field, remedy in itertools.islice(matching, 1)
    ]
    return "\n  ".join([f"Slurm rejected the job: {shown}", *hints])
