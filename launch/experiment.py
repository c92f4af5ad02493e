"""The one module that knows nemo-run: a job becomes an experiment of one script, written out or submitted.

Imports nemo-run, and with it torch: seconds. ``slurm.py`` imports this module inside its functions.

nemo-run 0.11.1 is used so that none of the following can happen; each was seen with other calls:

    /nemo_run in a path      replaced all over a script without a container      -> slurm.py refuses such paths
    environment variables    exported unquoted, names in capitals                -> travel in the job's file
    arguments of a script    joined unquoted                                     -> one path, quoted before
    paths with blanks        unquoted for srun, mkdir, tar and sbatch            -> quoted before nemo-run gets them
    run.Partial              runs the launching program again in every rank      -> run.Script
    several tasks            the second srun waits for the first                 -> one agent for each node
    packagers                leave out what is not committed                     -> the code is copied before
    exit status              0 whatever happened                                 -> exceptions here
    a dependency that failed the job waits for ever                              -> kill_on_invalid_dep
    text of a dry run        wrapped at 80 columns, without dependencies         -> the request itself
    polling                  needs sacct, and gives up when it is away           -> detached
"""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nemo_run as run
from nemo_run.core.execution.slurm import SlurmJobDetails

from launch.batch_script import Link, setup_lines
from launch.cluster import Cluster
from launch.spec import JobSpec, spec_file


@dataclass(kw_only=True)
class LogFiles(SlurmJobDetails):
    """Names of the job's own output: nemo-run puts the job's name into them, which may hold anything."""

    @property
    def stdout(self) -> Path:
        return Path(self.folder or "") / "sbatch-%j.out"

    @property
    def srun_stdout(self) -> str:  # type: ignore[override]
        """A word of shell: the number of the attempt is a variable there, so that no attempt overwrites another's."""
        folder = shlex.quote(self.folder or "")
        return f"{folder}/log-agents_%j_${{SLURM_RESTART_COUNT:-0}}.out"


@dataclass(frozen=True, kw_only=True)
class Submission:
    """What to submit, and under which names."""

    spec: JobSpec
    cluster: Cluster
    id: str  # "<title>_<anything>", letters, digits, '-' and '_'
    chain: int = 1
    array: str | None = None

    @property
    def title(self) -> str:
        return self.id.rpartition("_")[0]

    @property
    def base_dir(self) -> str:
        """Below it nemo-run keeps experiments."""
        return str(Path(self.spec.run_dir) / "launch")

    @property
    def spec_file(self) -> str:
        return str(spec_file(self.spec.run_dir, self.id))

    @property
    def code_dir(self) -> str:
        """The copy of the code that the job runs."""
        return str(Path(self.base_dir) / "code" / self.id)

    def task_name(self, index: int) -> str:
        return f"job{index}" if self.chain > 1 else "job"

    def job_dir(self, index: int) -> str:
        return str(Path(self.base_dir) / "experiments" / self.title / self.id / self.task_name(index))


def scripts(submission: Submission) -> list[str]:
    """The complete batch scripts, the same text for the same submission. Leaves nothing behind; needs no Slurm."""
    with tempfile.TemporaryDirectory() as scratch, _quiet():
        with _experiment(submission, scratch) as experiment:
            experiment.dryrun(log=False, delete_exp_dir=True)
            return [_script_of(job) for job in experiment.jobs]


def submit(submission: Submission) -> list[str]:
    """Queue the jobs and return their numbers, in the order of the chain.

    Raises what nemo-run raises, with what Slurm said, after having cancelled the jobs that were queued before.
    """
    with _quiet(), _experiment(submission, submission.base_dir) as experiment:
        try:
            experiment.run(detach=True)
        except BaseException:
            for job in experiment.jobs:
                if job.handle:
                    with contextlib.suppress(Exception):
                        experiment.cancel(job.id)
            raise
        return [_number_of(job.handle) for job in experiment.jobs]


@contextlib.contextmanager
def _experiment(submission: Submission, base_dir: str) -> Iterator[run.Experiment]:
    experiment = run.Experiment(
        submission.title,
        id=submission.id,
        base_dir=base_dir,
        clean_mode=True,
        log_level="ERROR",
        enable_goodbye_message=False,
        skip_status_at_exit=True,
        serialize_metadata_for_scripts=False,
    )
    script = run.Script(
        path=submission.spec.agent_module,
        m=True,
        entrypoint=shlex.quote(submission.cluster.interpreter),
        args=[shlex.quote(submission.spec_file)],
    )
    with experiment:
        previous: list[str] = []
        for index in range(submission.chain):
            name = experiment.add(
                script, executor=_executor(submission, index), name=submission.task_name(index), dependencies=previous
            )
            previous = [name]
        yield experiment


def _executor(submission: Submission, index: int) -> run.SlurmExecutor:
    cluster, spec = submission.cluster, submission.spec
    link = Link(index=index, length=submission.chain, chain=submission.id)
    job_dir = submission.job_dir(index)
    further = {"kill_on_invalid_dep": "yes", **{k.replace("-", "_"): v for k, v in cluster.sbatch.items()}}
    executor = run.SlurmExecutor(
        account=cluster.account,
        partition=cluster.partition,
        time=cluster.time_limit,
        nodes=spec.nodes,
        ntasks_per_node=1,
        cpus_per_task=cluster.cpus_per_node,
        gpus_per_node=cluster.gpus_per_node or None,
        signal=f"USR1@{spec.save_signal_s}",
        array=submission.array,
        job_name_prefix="-",
        job_details=LogFiles(job_name=spec.name, folder=job_dir),
        container_image=shlex.quote(cluster.container_image) if cluster.container_image else None,
        container_mounts=_mounts(submission),
        # An agent needs all cores of its node, ends within two minutes of the first that does, and tells the others.
        srun_args=["--cpu-bind=none", "--kill-on-bad-exit=0", "--wait=120", *map(shlex.quote, cluster.srun)],
        additional_parameters=further,
        setup_lines=setup_lines(spec, link, log_dir=job_dir, setup=cluster.setup),
        dependency_type="afterany",
        tunnel=run.LocalTunnel(job_dir=shlex.quote(str(Path(submission.base_dir) / "experiments"))),
        packager=run.GitArchivePackager(symlink_from_remote_dir=shlex.quote(submission.code_dir)),
        retries=0,
        launcher=None,
        poll_estimated_start_time=False,
    )
    return executor


def _mounts(submission: Submission) -> list[str]:
    """Words of shell, which nemo-run joins by commas: the cluster's, and what the job reads and writes."""
    cluster = submission.cluster
    if cluster.container_image is None:
        return []
    folders = [cluster.run_root] if cluster.run_root else []
    if not any(Path(submission.spec.run_dir).is_relative_to(folder) for folder in folders):
        folders.append(submission.spec.run_dir)
    return [shlex.quote(mount) for mount in (*cluster.container_mounts, *(f"{f}:{f}" for f in folders))]


def _script_of(job: Any) -> str:
    # Private, and the only text that is not wrapped for a terminal.
    return job._dryrun_info.request.materialize().rstrip() + "\n"


def _number_of(handle: str) -> str:
    """``slurm_tunnel://nemo_run/123`` or, on a cluster of a federation, ``.../123;name``."""
    return handle.rsplit("/", 1)[-1].partition(";")[0]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """nemo-run's shell reads from stdin, which need not be there, and its console writes to stdout."""
    stdin = sys.stdin
    with open(os.devnull) as nothing, contextlib.redirect_stdout(sys.stderr):
        sys.stdin = nothing
        try:
            yield
        finally:
            sys.stdin = stdin
