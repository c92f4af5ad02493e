"""``python -m launch CONFIG --cluster NAME [--field value ...]``: queue a run; and look after it when it is queued.

In: the configuration and overrides of ``python -m megatron_fp8rl``, and a cluster. Out: jobs, or every mistake at once.
Exit status: 0 submitted, and with ``--wait`` done; 1 a job failed that was waited for; 2 mistakes, nothing is queued.
Imports neither torch nor nemo-run.
"""

from __future__ import annotations

import contextlib
import importlib
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from launch import cluster as clusters
from launch import jobs, local, slurm
from launch.outcome import CANCELLED
from launch.plan import Plan, Request, lines
from launch.run_state import error_of, nothing_came, report_name
from launch.spec import SAVED, JobSpec, launch_dir, read_jobs
from megatron_fp8rl import cli as run_cli
from megatron_fp8rl.config import ConfigError
from megatron_fp8rl.preflight import doctor

_PROGRAM = "python -m launch"
WATCH = ("status", "logs", "cancel")
_USAGE = f"""\
usage: {_PROGRAM} CONFIG --cluster NAME [--field value ...]
       {_PROGRAM} status|logs|cancel RUN [--cluster NAME] [--help]

  --cluster NAME   a file of launch/clusters/ ({{known}}), or the path of one
  --job JOB        {", ".join(jobs.KINDS)}; train (warm start if there is one, then RL) unless said otherwise
  --nodes N        nodes of the job; as few as trainer and replicas fit on unless said otherwise
  --score-nodes K  K further nodes for the score servers (--data.score_servers), which else share the others
  --chain K        K jobs, each after the one before, for clusters that do not requeue
  --dry-run        print the complete batch script, and queue nothing
  --wait           until the job has ended; exit status 1 when it failed
  --id TEXT        name of the submission; letters, digits and '-'

CONFIG and --field value are those of `python -m megatron_fp8rl train`; so are options of the other jobs:
  --job eval --checkpoint FOLDER, --job study --seeds 1 2 3, --job sweep --over FIELD VALUE VALUE,
  --job convert with a checkpoint tool and its folders in the place of CONFIG."""


class UsageError(ValueError):
    """Arguments that cannot be understood."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """The launcher's own options, and what is left for others."""

    config_name: str
    cluster: str
    job: str = "train"
    nodes: int | None = None
    score_nodes: int = 0
    chain: int = 1
    dry_run: bool = False
    wait: bool = False
    id: str | None = None
    words: tuple[str, ...] = ()  # overrides, and options of the job's own program


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help"):
        print(_USAGE.format(known=", ".join(clusters.known())))
        return 0 if words else 2
    if words[0] in WATCH:
        return importlib.import_module("launch.watch").main(words)
    try:
        options = parse(words)
        request = read_request(options)
        return launch(options, request)
    except (UsageError, run_cli.UsageError, clusters.ClusterError, ConfigError) as error:
        print(f"{_PROGRAM}: {error}", file=sys.stderr)
        return 2
    except slurm.SubmitError as error:
        print(f"{_PROGRAM}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{_PROGRAM}: interrupted, nothing is queued", file=sys.stderr)
        return 2


def parse(words: Sequence[str]) -> Options:
    """Split the words. Raises UsageError that names the word."""
    queue, own, rest = list(words), {}, []
    own["config_name"] = queue.pop(0) if not queue[0].startswith("-") else ""
    while queue:
        word = queue.pop(0)
        name, _, value = word.partition("=")
        field = name.removeprefix("--").replace("-", "_")
        if name in ("--dry-run", "--dry_run", "--wait"):
            own[field] = True
        elif field in ("cluster", "job", "nodes", "score_nodes", "chain", "id") and name.startswith("--"):
            if "=" not in word:
                if not queue:
                    raise UsageError(f"{name} needs a value")
                value = queue.pop(0)
            own[field] = _number(name, value) if field in ("nodes", "score_nodes", "chain") else value
        else:
            rest.append(word)
    return _checked(own, rest)


def _checked(own: dict, rest: list[str]) -> Options:
    if "cluster" not in own:
        raise UsageError(f"--cluster is missing. Clusters: {', '.join(clusters.known())}; or give the path of a file")
    job = own.get("job", "train")
    if job not in jobs.KINDS:
        raise UsageError(f"--job {job!r} is unknown. Jobs: {', '.join(jobs.KINDS)}")
    if "id" in own and slurm.slug(own["id"]) != own["id"]:
        raise UsageError(f"--id {own['id']!r}: use letters, digits and '-' alone")
    if own.get("chain", 1) < 1:
        raise UsageError(f"--chain {own['chain']}: a chain has one job or more")
    if own.get("score_nodes", 1) < 1:
        raise UsageError(f"--score-nodes {own['score_nodes']}: name 1 node or more, or leave it out")
    if not own["config_name"]:
        what = "TOOL" if job == "convert" else "CONFIG"
        raise UsageError(f"{what} is missing: {_PROGRAM} {what} --cluster {own['cluster']} ...")
    return Options(**own, words=tuple(rest))


def read_request(options: Options) -> Request:
    """Load the configuration and the cluster. Raises what their loaders raise; an unknown field raises SystemExit."""
    cluster = clusters.load(options.cluster)
    target = jobs.read(options.job, options.config_name, options.words)
    return Request(
        job=options.job,
        cluster=cluster,
        config_name=options.config_name,
        cfg=target.cfg,
        overrides=target.overrides,
        nodes=options.nodes,
        score_nodes=options.score_nodes,
        words=target.words,
        code_dir=_code_dir(options.config_name),
    )


def launch(options: Options, request: Request) -> int:
    """Plan, and then print, queue or refuse."""
    plan = jobs.plan(request)
    cluster, spec = request.cluster, plan.spec
    problems, warnings = list(plan.problems), list(plan.warnings)
    missing = [str(violation) for violation in cluster.missing_files()]
    if options.dry_run:
        warnings += missing
    else:
        problems += missing
    if spec is not None:
        problems += slurm.problems(spec, cluster) if cluster.kind == "slurm" else spec.problems()
        if not options.dry_run and not problems:
            problems += _running(spec, cluster)
            found, said = _data(options, request)
            problems, warnings = problems + found, warnings + said
    if options.chain > 1 and (cluster.kind == "local" or plan.array):
        why = "an array has no chains" if plan.array else "a local job is started again by itself"
        problems.append(f"--chain {options.chain}: {why}. Leave it out.")
    for text in warnings:
        print(f"warning: {text}", file=sys.stderr)
    if problems or spec is None:
        noun = "problem" if len(problems) == 1 else "problems"
        print(f"{_PROGRAM}: {len(problems)} {noun}, nothing is queued:", file=sys.stderr)
        for number, text in enumerate(problems, 1):
            print(f"  {number}. {text}", file=sys.stderr)
        return 2
    if options.dry_run:
        _show_dry_run(options, plan, request)
        return 0
    try:
        launch_dir(spec.run_dir).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        print(f"{_PROGRAM}: the run's folder {spec.run_dir!r} cannot be made: {error}", file=sys.stderr)
        return 2
    return _local(options, spec) if cluster.kind == "local" else _slurm(options, plan, request)


def _data(options: Options, request: Request) -> tuple[list[str], list[str]]:
    """(problems, warnings) of the data of a training job."""
    if options.job not in ("train", "rl") or request.cfg is None:
        return [], []
    lines, findings = doctor.look_at_data(request.cfg)
    print("\n".join(lines))
    by_severity = [[f.problem for f in findings if f.severity == severity] for severity in ("error", "warning")]
    return by_severity[0], by_severity[1]


def _show_dry_run(options: Options, plan: Plan, request: Request) -> None:
    """The scripts, each with the job in words below its first line, which has to stay the first."""
    assert plan.spec is not None
    # A line break in a value must not become a command of the script.
    words = ["# " + line.replace("\r", "\\r").replace("\n", "\\n") for line in lines(plan.spec)]
    if request.cluster.kind == "local":
        agents = "1 agent" if plan.spec.nodes == 1 else f"{plan.spec.nodes} agents"
        print("\n".join([*words, f"# {agents} on this machine: python -m launch.agent JOB.json"]))
        return
    name = None if options.id is None else f"{slurm.slug(plan.spec.name)}_{options.id}"
    scripts = slurm.dry_run(plan.spec, request.cluster, id=name, chain=options.chain, array=plan.array)
    for index, script in enumerate(scripts):
        first, _, rest = script.partition("\n")
        place = [f"# job {index + 1} of {len(scripts)}"] if len(scripts) > 1 else []
        print("\n".join([first, "#", *place, *words, rest]), end="")


def _slurm(options: Options, plan: Plan, request: Request) -> int:
    spec = plan.spec
    assert spec is not None
    name = None if options.id is None else f"{slurm.slug(spec.name)}_{options.id}"
    launched = slurm.submit(
        spec, request.cluster, cluster_name=options.cluster, id=name, chain=options.chain, array=plan.array
    )
    numbers = ", ".join(launched.job_ids)
    queued = f"jobs {numbers} are" if len(launched.job_ids) > 1 else f"job {numbers} is"
    headline = f"{queued} queued on cluster {options.cluster!r}"
    _show_launched(headline, spec)
    if not options.wait:
        return 0
    try:
        status, shown = slurm.wait(launched.job_ids)
    except KeyboardInterrupt:
        print("not waiting any longer; the job goes on", file=sys.stderr)
        return 1
    print("\n".join(shown))
    if any(not line.endswith((": COMPLETED", ": CANCELLED")) for line in shown):
        _show_first_error(spec, launched.job_ids)
    return status


def _local(options: Options, spec: JobSpec) -> int:
    job_id, process = local.start(spec, cluster_name=options.cluster)
    _show_launched(f"job {job_id} has begun on this machine", spec)
    if not options.wait:
        return 0
    try:
        status = process.wait()
    except KeyboardInterrupt:
        print("not waiting any longer; the job goes on", file=sys.stderr)
        return 1
    words = {0: "COMPLETED", CANCELLED: "CANCELLED", SAVED: "saved, and asked to end"}
    print(f"job {job_id}: {words.get(status, f'FAILED with status {status}')}")
    if status not in words:
        _show_first_error(spec, (job_id,))
    return int(status != 0)


def _show_launched(headline: str, spec: JobSpec) -> None:
    run = shlex.quote(spec.run_dir)
    print(headline)
    print("\n".join(line for line in lines(spec) if not line.startswith("    ")))
    if (report := "sweep.md" if spec.agent_module != JobSpec.agent_module else report_name(spec)) is not None:
        print(f"report: {spec.run_dir}/{report}")
    print(f"watch:  {_PROGRAM} status {run}\n        {_PROGRAM} logs {run} --follow\n        {_PROGRAM} cancel {run}")
    sys.stdout.flush()


def _show_first_error(spec: JobSpec, job_ids: Sequence[str]) -> None:
    """What failed first, or where to look."""
    if spec.agent_module != JobSpec.agent_module:
        said = f"`python -m launch.sweep {shlex.quote(spec.run_dir)}` shows which elements failed"
    else:
        attempts = [path for job_id in job_ids for path in sorted(launch_dir(spec.run_dir).glob(f"{job_id}.*"))]
        said = f"it left no error; `{_PROGRAM} logs {shlex.quote(spec.run_dir)}` shows its logs"
        if not attempts and not job_ids[0].startswith("local-"):
            said = nothing_came(spec.run_dir, job_ids[0])
        for path in attempts:
            if (error := error_of(path)) is not None:
                said = f"first error of job {path.stem} ({error}):\n{error.read_text(errors='replace').strip()}"
                break
    print(said, file=sys.stderr)


def _running(spec: JobSpec, cluster: clusters.Cluster) -> list[str]:
    """Jobs that work in the run's folder already: two would overwrite each other's checkpoints, logs and endpoints."""
    found = []
    for job in read_jobs(spec.run_dir):
        if (state := _state(job)) is not None:
            found.append(
                f"job {job['job_id']} of cluster {job['cluster']!r} is {state} in {spec.run_dir}. Cancel it by "
                f"`{_PROGRAM} cancel`, or choose another --output_dir."
            )
    return found


def _state(job: dict) -> str | None:
    """The state of a job that has not ended; None when it has, or nobody knows."""
    if job["kind"] == "slurm":
        state = slurm.job_state(job["job_id"])
        return state if state is not None and not slurm.is_over(state) else None
    with contextlib.suppress(OSError):
        shown = subprocess.run(
            ["ps", "-o", "args=", "-p", job["job_id"].removeprefix("local-")],
            capture_output=True,
            text=True,
            timeout=60,
        ).stdout
        return "RUNNING" if "launch.local" in shown else None
    return None


def _code_dir(config_name: str) -> str | None:
    """Where the module of a configuration of the user's own is found, when it is not part of this code."""
    module = sys.modules.get(config_name.partition(":")[0]) if ":" in config_name else None
    path = getattr(module, "__file__", None)
    if path is None:
        return None
    depth = module.__name__.count(".") + 1 + Path(path).name.startswith("__init__")
    root = Path(path).absolute().parents[depth - 1]
    return None if root == Path(__file__).absolute().parents[1] else str(root)


def _number(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"{name} {text!r} is no number") from None
