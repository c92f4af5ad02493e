"""Runs a job through nemo-run: the user's executor and this package's job, as one experiment.

    import nemo_run as run
    from launch import nemo

    with nemo.experiment(cfg, executor, gpu="h100", run_root="/lustre/me") as experiment:
        experiment.run(detach=True)

In: a configuration and a ``run.SlurmExecutor``. Out: a ``run.Experiment`` of one task, for ``nemo experiment status``,
``logs`` and ``cancel``. nemo-run writes and submits the batch script with the executor's account, partition, container,
mounts, variables and setup. One agent per node starts and restarts the roles; the executor's launcher is not used.
Importing nemo-run also imports torch, which takes seconds.

Problems of nemo-run 0.11.1 (all observed), and what this module does:

    /nemo_run in a path      replaced everywhere in a script without container   -> such folders are refused
    environment variables    exported unquoted, in capitals, kept in its records -> sent in the job's file, mode 0600
    paths with blanks        unquoted for srun, mkdir and tar                    -> quoted before nemo-run gets them
    packagers                omit uncommitted files                              -> the code is copied before
    retries                  after any end of the job                            -> the agents decide
"""

from __future__ import annotations

import copy
import shlex
from typing import Any

import nemo_run as run

from launch import in_use, jobs, slurm, user_files
from launch.batch_script import ORDER, Submission, ending, ending_options, run_mounts
from launch.cluster import Cluster
from launch.plan import Request
from launch.spec import TRAINING_JOBS
from megatron_fp8rl.config import RunConfig
from megatron_fp8rl.config_source import as_function
from megatron_fp8rl.envs.source_kind import is_supervised
from megatron_fp8rl.preflight import data_check

PLACEHOLDER = "/nemo_run"
# Folder of the job's output.
_FOLDER = """folder=$(dirname "$(scontrol -o show job "$SLURM_JOB_ID" | sed -n 's/.* StdOut=\\([^ ]*\\).*/\\1/p')")"""
_CONFIG = "launched_config"  # module beside the copied code; its function returns the configuration


class PlanError(ValueError):
    """The job cannot run. The message lists every problem, one per line."""


def experiment(
    cfg: RunConfig,
    executor: run.SlurmExecutor,
    *,
    job: str = "train",
    nodes: int | None = None,
    title: str | None = None,
    **cluster_fields: Any,
) -> run.Experiment:
    """An experiment with the job as its only task; enter it and call ``run``. Writes files below the run's folder.

    Args:
        job: ``train``, ``rl`` or ``sft``.
        cluster_fields: fields of :class:`~launch.cluster.Cluster` that an executor lacks: ``gpu``, ``ranks_per_node``,
            ``run_root``, ``max_restarts``, ``python``.

    Raises:
        ClusterError: the executor cannot be used.
        PlanError: any other problem; the message lists all.
    """
    cluster = Cluster.from_executor(executor, **cluster_fields)
    submission, source = _planned(cfg, cluster, job, nodes, title)
    with slurm.removed_on_error(submission):
        slurm.write(submission)
        (submission.code_dir / f"{_CONFIG}.py").write_text(source, encoding="utf-8")
        return _experiment(executor, submission, cluster)


def _experiment(executor: run.SlurmExecutor, submission: Submission, cluster: Cluster) -> run.Experiment:
    name = submission.id.rpartition("_")[0]
    made = run.Experiment(name, id=submission.id, serialize_metadata_for_scripts=False)
    script = run.Script(
        path="launch.agent",
        m=True,
        entrypoint=shlex.quote(cluster.interpreter),
        args=[shlex.quote(str(submission.folder / "job.json"))],
    )
    with made:
        made.add(script, executor=_executor(executor, submission), name=name)
    return made


def _planned(
    cfg: RunConfig, cluster: Cluster, job: str, nodes: int | None, title: str | None
) -> tuple[Submission, str]:
    """(submission, source of the configuration module). Raises PlanError."""
    if job not in TRAINING_JOBS:
        raise PlanError(f"job = {job!r}: choose one of {', '.join(TRAINING_JOBS)}; `python -m launch` runs the others")
    source = as_function(cfg) + "\n"
    function = source.partition("\ndef ")[2].partition("(")[0]
    plan = jobs.plan(Request(job=job, cluster=cluster, config_name=f"{_CONFIG}:{function}", cfg=cfg, nodes=nodes))
    problems = [*plan.problems, *map(str, cluster.missing_files())]
    if plan.spec is not None:
        problems += slurm.problems(plan.spec, cluster) + user_files.unreachable(cfg, cluster, plan.spec.run_dir)
        if PLACEHOLDER in plan.spec.run_dir:
            folder = plan.spec.run_dir
            problems.append(f"the run's folder = {folder!r} contains {PLACEHOLDER!r}, which nemo-run replaces")
        if job != "sft" or is_supervised(cfg):
            problems += [finding.problem for finding in data_check.look_at_data(cfg)[1] if finding.severity == "error"]
        if not problems:
            problems += in_use.problems(plan.spec, cluster.sbatch)
    if problems or plan.spec is None:
        raise PlanError("\n".join(problems))
    id = slurm.new_id(plan.spec)
    if title is not None:
        id = f"{slurm.slug(title)}_{id.rpartition('_')[2]}"
    return slurm.with_code(Submission(spec=plan.spec, cluster=cluster, id=id)), source


def _executor(executor: run.SlurmExecutor, submission: Submission) -> run.SlurmExecutor:
    """A copy of the user's executor with one task per node, and the launcher's lines before and after the agents."""
    spec = submission.spec
    ours = copy.deepcopy(executor)
    ours.nodes, ours.ntasks_per_node, ours.launcher, ours.env_vars = spec.nodes, 1, None, {}
    ours.signal = f"USR1@{spec.save_signal_s}"
    ours.srun_args = [*(ours.srun_args or []), *ending_options(spec)]
    ours.additional_parameters = {**(ours.additional_parameters or {}), "requeue": True}
    setup = f"set +evx\n{_FOLDER}\n{ending(spec)}{ORDER}"
    ours.setup_lines = "\n".join([setup, *([executor.setup_lines] if executor.setup_lines else [])])
    ours.packager = run.GitArchivePackager(symlink_from_remote_dir=shlex.quote(str(submission.code_dir)))
    if ours.container_image is not None:
        ours.container_image = shlex.quote(ours.container_image)
        ours.container_mounts = [shlex.quote(mount) for mount in (*ours.container_mounts, *run_mounts(submission))]
    return ours
