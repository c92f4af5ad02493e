"""Run a job through nemo-run: the executor of the user, the job of this package, one experiment.

    import nemo_run as run
    from launch import nemo

    with nemo.experiment(cfg, executor, gpu="h100", run_root="/lustre/me") as experiment:
        experiment.run(detach=True)

In: a configuration and a ``run.SlurmExecutor``. Out: a ``run.Experiment`` of one task, which ``nemo experiment status``,
``logs`` and ``cancel`` know. nemo-run writes and submits the batch script; the executor's account, partition, container,
mounts, variables and setup are kept. Each node runs one agent, which starts and restarts the roles: the launcher of the
executor is not used. Imports nemo-run, and with it torch: seconds.

What nemo-run 0.11.1 would do to a job otherwise, each seen:

    /nemo_run in a path      replaced all over a script without a container      -> such folders are refused
    environment variables    exported unquoted, in capitals, kept in its records -> travel in the job's file, mode 0600
    paths with blanks        unquoted for srun, mkdir and tar                    -> quoted before nemo-run gets them
    packagers                leave out what is not committed                     -> the code is copied before
    retries                  whatever ended the job                              -> the agents decide
"""

from __future__ import annotations

import copy
import shlex
from typing import Any

import nemo_run as run

from launch import jobs, slurm, user_files
from launch.batch_script import ORDER, SRUN, Submission, ending, run_mounts
from launch.cluster import Cluster
from launch.plan import Request
from megatron_fp8rl.config import RunConfig
from megatron_fp8rl.config_source import as_function
from megatron_fp8rl.preflight import data_check

PLACEHOLDER = "/nemo_run"
# Where nemo-run puts the job's output.
_FOLDER = """folder=$(dirname "$(scontrol -o show job "$SLURM_JOB_ID" | sed -n 's/.* StdOut=\\([^ ]*\\).*/\\1/p')")"""
_CONFIG = "launched_config"  # the module, beside the copied code, that returns the configuration


class PlanError(ValueError):
    """The job cannot be: every reason, one a line."""


def experiment(
    cfg: RunConfig,
    executor: run.SlurmExecutor,
    *,
    job: str = "train",
    nodes: int | None = None,
    title: str | None = None,
    **cluster_fields: Any,
) -> run.Experiment:
    """An experiment with the whole job as its one task; enter it and call ``run``.

    ``job`` is ``train``, ``rl`` or ``sft``. ``cluster_fields`` are fields of :class:`~launch.cluster.Cluster` that an
    executor does not have: ``gpu``, ``ranks_per_node``, ``run_root``, ``max_restarts``, ``python``. Writes the job's files
    below the run's folder. Raises ClusterError for an executor that cannot be used, PlanError with every problem else.
    """
    cluster = Cluster.from_executor(executor, **cluster_fields)
    submission, source = _planned(cfg, cluster, job, nodes, title)
    slurm.write(submission)
    (submission.code_dir / f"{_CONFIG}.py").write_text(source, encoding="utf-8")
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
    """(the submission, the source of its configuration). Raises PlanError."""
    if job not in ("train", "rl", "sft"):
        raise PlanError(f"job = {job!r}: choose train, rl or sft; `python -m launch` has the others")
    source = as_function(cfg) + "\n"
    function = source.partition("\ndef ")[2].partition("(")[0]
    plan = jobs.plan(Request(job=job, cluster=cluster, config_name=f"{_CONFIG}:{function}", cfg=cfg, nodes=nodes))
    problems = [*plan.problems, *map(str, cluster.missing_files())]
    if plan.spec is not None:
        problems += slurm.problems(plan.spec, cluster) + user_files.unreachable(cfg, cluster, plan.spec.run_dir)
        if PLACEHOLDER in plan.spec.run_dir:
            problems.append(f"the run's folder = {plan.spec.run_dir!r} holds {PLACEHOLDER!r}, which nemo-run replaces")
        if job != "sft":
            problems += [found.problem for found in data_check.look_at_data(cfg)[1] if found.severity == "error"]
    if problems or plan.spec is None:
        raise PlanError("\n".join(problems))
    id = (
        slurm.new_id(plan.spec)
        if title is None
        else f"{slurm.slug(title)}_{slurm.new_id(plan.spec).rpartition('_')[2]}"
    )
    return slurm.with_code(Submission(spec=plan.spec, cluster=cluster, id=id)), source


def _executor(executor: run.SlurmExecutor, submission: Submission) -> run.SlurmExecutor:
    """The user's, with one task on each node, and with the launcher's beginning and end."""
    spec = submission.spec
    ours = copy.deepcopy(executor)
    ours.nodes, ours.ntasks_per_node, ours.launcher, ours.env_vars = spec.nodes, 1, None, {}
    ours.signal = f"USR1@{spec.save_signal_s}"
    ours.srun_args = [*(ours.srun_args or []), *SRUN]
    ours.additional_parameters = {**(ours.additional_parameters or {}), "requeue": True}
    setup = f"set +evx\n{_FOLDER}\n{ending(spec)}{ORDER}"
    ours.setup_lines = "\n".join([setup, *([executor.setup_lines] if executor.setup_lines else [])])
    ours.packager = run.GitArchivePackager(symlink_from_remote_dir=shlex.quote(str(submission.code_dir)))
    if ours.container_image is not None:
        ours.container_image = shlex.quote(ours.container_image)
        ours.container_mounts = [shlex.quote(mount) for mount in (*ours.container_mounts, *run_mounts(submission))]
    return ours
