"""A job on Slurm: its batch script as text, its submission, and the wait for its end.

In: a :class:`~launch.spec.JobSpec` and a cluster. Out: text, or numbers of jobs that run whether this process lives or
not. nemo-run is imported by the functions that need it; Slurm's own commands are asked directly, since nemo-run's
status needs accounting and its exit status says nothing.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import subprocess
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

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
# nemo-run 0.11.1 replaces this text wherever it stands in a script without a container.
NEMO_RUN_PLACEHOLDER = "/nemo_run"
# What overrules a batch script in the environment of sbatch, and the field of CLUSTER that it would overrule.
_OVERRULING = {"SBATCH_ACCOUNT": "account", "SBATCH_PARTITION": "partition", "SBATCH_TIMELIMIT": "time_limit"}
# Reasons of a pending job that no waiting changes.
_NEVER = {
    "PartitionTimeLimit": "CLUSTER.time_limit is above the partition's",
    "PartitionNodeLimit": "the partition has too few nodes for one job: use fewer --nodes",
    "PartitionConfig": "the partition cannot run it: compare CLUSTER with `scontrol show partition`",
    "BadConstraints": "no node has what is asked for: compare CLUSTER with `sinfo -o '%n %c %m %G %f'`",
    "AccountNotAllowed": "CLUSTER.account may not use this partition",
    "InvalidAccount": "CLUSTER.account is not known",
    "InvalidQOS": "CLUSTER.sbatch['qos'] is not known",
    "QOSNotAllowed": "CLUSTER.sbatch['qos'] may not be used here",
    "QOSMaxWallDurationPerJobLimit": "CLUSTER.time_limit is above the QOS's",
    "AssocMaxWallDurationPerJobLimit": "CLUSTER.time_limit is above the account's",
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


@dataclass(frozen=True, kw_only=True)
class Launched:
    """Jobs in the queue."""

    job_ids: tuple[str, ...]  # in the order of the chain
    run_dir: str
    experiment_dir: str


def new_id(spec: JobSpec, *, now: Callable[[], float] = time.time) -> str:
    """A name for one submission: letters, digits, '-' and one '_'."""
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(now()))
    return f"{slug(spec.name)}_{stamp}-{int(now() * 1000) % 1000:03d}"


def slug(name: str) -> str:
    """A name without anything that a shell, a path or nemo-run reads."""
    return re.sub(r"[^A-Za-z0-9-]+", "-", name).strip("-")[:60] or "job"


def problems(spec: JobSpec, cluster: Cluster) -> list[str]:
    """What nemo-run or Slurm would get wrong, each in one sentence with what to do."""
    found = list(spec.problems())
    texts = {"the run's folder": spec.run_dir, "CLUSTER.python": cluster.interpreter}
    for name in ("setup", "srun"):
        texts |= {f"CLUSTER.{name}[{i}]": text for i, text in enumerate(getattr(cluster, name))}
    texts |= {f"CLUSTER.sbatch[{name!r}]": str(value) for name, value in cluster.sbatch.items()}
    if cluster.container_image is None:
        found += [
            f"{what} = {text!r} holds {NEMO_RUN_PLACEHOLDER!r}, which nemo-run replaces in scripts without a "
            "container. Use another folder, or a link with another name."
            for what, text in texts.items()
            if NEMO_RUN_PLACEHOLDER in text
        ]
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


def dry_run(
    spec: JobSpec, cluster: Cluster, *, id: str | None = None, chain: int = 1, array: str | None = None
) -> list[str]:
    """The complete batch scripts. Needs no Slurm; the same text for the same id."""
    nemo = _nemo_run()
    id = id or f"{slug(spec.name)}_dry-run"
    scripts = nemo.scripts(_submission(nemo, spec, cluster, id, chain, array))
    for index in range(1, len(scripts)):
        # It stands on sbatch's command line, with a number that only Slurm knows.
        scripts[index] = scripts[index].replace(
            "# Run with: sbatch --requeue --parsable",
            f"# Run with: sbatch --requeue --parsable --dependency=afterany:JOB_{index}",
        )
    return scripts


def submit(
    spec: JobSpec,
    cluster: Cluster,
    *,
    cluster_name: str,
    id: str | None = None,
    chain: int = 1,
    array: str | None = None,
) -> Launched:
    """Queue the job, or a chain of them, and return at once. Raises SubmitError, and leaves nothing queued then."""
    if shutil.which("sbatch") is None:
        raise SubmitError(
            f"cluster {cluster_name!r}: this machine has no sbatch. Run this on a login node, or use --cluster local "
            "or --dry-run"
        )
    nemo = _nemo_run()
    submission = _submission(nemo, spec, cluster, id or new_id(spec), chain, array)
    code_dir = Path(submission.code_dir)
    if code_dir.exists():
        folder = code_dir.parents[1]
        raise SubmitError(f"there is a submission {submission.id!r} already in {folder}: choose another --id")
    job_ids: list[str] = []
    try:
        copy_code(code_dir, spec.own_files)
        submission.spec.save(submission.spec_file)
        job_ids = nemo.submit(submission)
        for index, job_id in enumerate(job_ids):  # at once: elements of a sweep read it when they begin
            add_job(spec.run_dir, _record(submission, index, job_id, spec, cluster_name))
        _refuse_hopeless(job_ids, cluster_name)
    except BaseException as error:  # an interrupt too: no job stays of which its user was not told
        if job_ids:
            ask_here("scancel", *job_ids)
        shutil.rmtree(code_dir, ignore_errors=True)
        Path(submission.spec_file).unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise SubmitError(f"the run's folder {spec.run_dir!r} cannot be written: {error}") from error
        if isinstance(error, SubmitError) or not isinstance(error, Exception):
            raise
        raise SubmitError(f"cluster {cluster_name!r}: {_what_slurm_said(error, cluster)}") from error
    folder = str(Path(submission.job_dir(0)).parent)
    return Launched(job_ids=tuple(job_ids), run_dir=spec.run_dir, experiment_dir=folder)


def _record(submission: Any, index: int, job_id: str, spec: JobSpec, cluster_name: str) -> dict[str, Any]:
    """The line of a job in the run's file of jobs."""
    folder = submission.job_dir(index)
    return {
        "job_id": job_id,
        "cluster": cluster_name,
        "kind": "slurm",
        "name": spec.name,
        "nodes": spec.nodes,
        "submitted_at": time.time(),
        "experiment": submission.id,
        "folder": folder,
        "script": str(Path(folder).parent / f"{submission.task_name(index)}_sbatch.sh"),
        "array": submission.array,
        "spec": submission.spec_file,
    }


def _submission(nemo: ModuleType, spec: JobSpec, cluster: Cluster, id: str, chain: int, array: str | None) -> Any:
    """With the copied code first on every role's PYTHONPATH."""
    submission = nemo.Submission(spec=spec, cluster=cluster, id=id, chain=chain, array=array)
    inherited = spec.env.get("PYTHONPATH")
    path = f"{submission.code_dir}:{inherited}" if inherited else submission.code_dir
    env = {**spec.env, "PYTHONPATH": path, COPIES: f"{submission.code_dir}/{_OWN}"}
    return dataclasses.replace(submission, spec=dataclasses.replace(spec, env=env))


def copy_code(folder: Path, own_files: Sequence[str] = ()) -> None:
    """Keep this code, and the user's reward functions, as they are: a job that waits for days, or starts again, must not
    run what is edited meanwhile."""
    folder.mkdir(parents=True)
    ignore = shutil.ignore_patterns("__pycache__", "*.pyc", "*.egg-info")
    for package in _PACKAGES:
        shutil.copytree(_ROOT / package, folder / package, ignore=ignore)
    for name in ("requirements.toml",):
        if (_ROOT / name).is_file():
            shutil.copy(_ROOT / name, folder / name)
    for file in own_files:
        target = folder / _OWN / file.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, target)


def wait(job_ids: Sequence[str], *, poll_s: float = _POLL_S) -> tuple[int, list[str]]:
    """Until all jobs have ended: (0 or 1, a line for each). Asks Slurm, with accounting or without.

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
    lines = [f"job {job_id}: {states[job_id]}" for job_id in job_ids]
    return int(any(state != "COMPLETED" for state in states.values())), lines


def job_state(job_id: str) -> str | None:
    """Slurm's word for the state of a job; None when nobody answers.

    Of an array RUNNING while any element runs, then what others wait for, then the worst.
    """
    shown = ask_here("scontrol", "-o", "show", "job", job_id)
    found = re.findall(r"\bJobState=(\w+)", shown or "")
    if not found:
        accounted = ask_here("sacct", "-X", "-n", "-P", "-o", "State", "-j", job_id)
        found = [line.split()[0] for line in (accounted or "").splitlines() if line.split()]
    running = sorted((state for state in found if not is_over(state)), key=lambda state: state != "RUNNING")
    failed = [state for state in found if state != "COMPLETED"]
    return (running or failed or found or [None])[0]


def is_over(state: str) -> bool:
    """Whether a job in this state will never run again."""
    waiting = {"PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "CONFIGURING", "SPECIAL_EXIT", "RESV_DEL_HOLD"}
    working = {"RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "RESIZING", "SIGNALING", "STAGE_OUT"}
    return state not in waiting | working


def _refuse_hopeless(job_ids: Sequence[str], cluster_name: str) -> None:
    """Cancel jobs that Slurm has queued and says to be impossible. Raises SubmitError."""
    time.sleep(_HELD_S)
    reason = (ask_here("squeue", "-h", "-o", "%r", "-j", job_ids[0]) or "").strip()
    if reason in _NEVER:
        ask_here("scancel", *job_ids)
        raise SubmitError(
            f"cluster {cluster_name!r}: Slurm would never start job {job_ids[0]} ({reason}): {_NEVER[reason]}. "
            "It is cancelled"
        )


def ask_here(*words: str, deadline_s: float = _COMMAND_DEADLINE_S) -> str | None:
    """Output of one of Slurm's commands on this machine; None when it fails, is missing, or does not answer."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=deadline_s, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _what_slurm_said(error: BaseException, cluster: Cluster) -> str:
    """The lines of sbatch within an exception of nemo-run, and the field that they are about."""
    result = getattr(error, "result", None)
    text = getattr(result, "stderr", "") or str(error)
    said = [line.strip() for line in text.splitlines() if "error" in line.lower()] or text.strip().splitlines()[-3:]
    shown = "; ".join(said) or type(error).__name__
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


def _nemo_run() -> ModuleType:
    """``launch.experiment``, which imports nemo-run. Raises SubmitError when it cannot be imported."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from launch import experiment
    except ImportError as error:
        raise SubmitError(f"nemo-run cannot be imported ({error}): run `make install EXTRAS=launch`") from error
    return experiment
