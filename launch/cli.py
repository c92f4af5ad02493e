"""``python -m launch CONFIG --cluster NAME [--field value ...]``: queue a run, then monitor or cancel it.

In: configuration and overrides of ``python -m megatron_fp8rl``, and a cluster. Out: jobs, or all errors at once. Exit
status: 0 submitted (with ``--wait``: completed); 1 a job failed (with ``--wait``); 2 invalid input, nothing is queued.
Imports neither torch nor nemo-run.
"""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from launch import cluster as clusters
from launch import in_use, jobs, local, slurm, sweep, user_files
from launch.outcome import CANCELLED
from launch.plan import Plan, Request, absolute_run_dir, lines
from launch.run_state import error_file, no_output_message, report_name
from launch.spec import SAVED, JobSpec, launch_dir, read_jobs
from megatron_fp8rl import cli as run_cli
from megatron_fp8rl.config import ConfigError
from megatron_fp8rl.preflight import data_check
from megatron_fp8rl.preflight.findings import Finding

_PROGRAM = "python -m launch"
WATCH = ("status", "logs", "cancel")
_USAGE = f"""\
usage: {_PROGRAM} CONFIG --cluster NAME [--field value ...]
       {_PROGRAM} status|logs|cancel RUN [--cluster NAME] [--help]

  --cluster NAME   a cluster in launch/clusters/ ({{known}}), or the path of a cluster file
  --job JOB        {", ".join(jobs.KINDS)}; default: train (warm start if configured, then RL)
  --nodes N        number of nodes; default: the fewest that fit trainer and replicas
  --over FIELD VALUE VALUE ...   one job per value; if repeated, one job per combination of values
  --dry-run        print the complete batch script and queue nothing
  --wait           wait for the job to end; exit status 1 if it failed
  --id TEXT        submission name: letters, digits and '-'

CONFIG and --field value work as in `python -m megatron_fp8rl train`. Other jobs take the options of their command:
  --job eval --checkpoint FOLDER, --job study --seeds 1 2 3,
  --job convert with a checkpoint tool and its folders instead of CONFIG."""


class UsageError(ValueError):
    """Invalid command-line arguments."""


@dataclass(frozen=True, kw_only=True)
class Options:
    config_name: str
    cluster: str
    job: str = "train"
    nodes: int | None = None
    dry_run: bool = False
    wait: bool = False
    id: str | None = None
    over: sweep.Axes = ()
    args: tuple[str, ...] = ()  # overrides, and options of the job's program


def main(argv: Sequence[str] | None = None) -> int:
    args = list(sys.argv[1:] if argv is None else argv)
    if not args or args[0] in ("-h", "--help"):
        print(_USAGE.format(known=", ".join(clusters.known())))
        return 0 if args else 2
    if args[0] in WATCH:
        return importlib.import_module("launch.watch").main(args)
    try:
        options = parse(args)
        if options.over:
            return _sweep(options)
        return launch(options, read_request(options))
    except (UsageError, run_cli.UsageError, clusters.ClusterError, ConfigError, slurm.SubmitError) as error:
        print(f"{_PROGRAM}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{_PROGRAM}: interrupted, nothing is queued", file=sys.stderr)
        return 2


def parse(args: Sequence[str]) -> Options:
    """Parse the arguments. Raises UsageError that names the invalid argument."""
    queue, options, rest = list(args), {}, []
    options["config_name"] = queue.pop(0) if not queue[0].startswith("-") else ""
    while queue:
        word = queue.pop(0)
        name, _, value = word.partition("=")
        field = name.removeprefix("--").replace("-", "_")
        if name == "--over":
            values = [queue.pop(0) for _ in itertools.takewhile(lambda arg: not arg.startswith("--"), [*queue])]
            if len(values) < 2:
                example = "name a field and its values: --over optim.lr 1e-6 3e-6"
                raise UsageError(f"--over {' '.join(values)}: {example}")
            options.setdefault("over", []).append((values[0], tuple(dict.fromkeys(values[1:]))))
        elif name in ("--dry-run", "--dry_run", "--wait"):
            options[field] = True
        elif field in ("cluster", "job", "nodes", "id") and name.startswith("--"):
            if "=" not in word:
                if not queue:
                    raise UsageError(f"{name} needs a value")
                value = queue.pop(0)
            options[field] = value
        else:
            rest.append(word)
    return _checked(options, rest)


def _checked(options: dict, rest: list[str]) -> Options:
    if "nodes" in options:
        try:
            options["nodes"] = int(options["nodes"])
        except ValueError:
            raise UsageError(f"--nodes {options['nodes']!r} is not a number") from None
    if "cluster" not in options:
        raise UsageError(f"--cluster is missing. Clusters: {', '.join(clusters.known())}; or give the path of a file")
    job = options.get("job", "train")
    if job not in jobs.KINDS:
        raise UsageError(f"--job {job!r} is unknown. Jobs: {', '.join(jobs.KINDS)}")
    if "id" in options and slurm.slug(options["id"]) != options["id"]:
        raise UsageError(f"--id {options['id']!r}: use only letters, digits and '-'")
    fields = [field for field, _ in options.get("over", [])]
    if twice := [field for field in dict.fromkeys(fields) if fields.count(field) > 1]:
        raise UsageError(f"--over {twice[0]} occurs twice; give all its values at once")
    if fields and job not in sweep.JOBS:
        raise UsageError(f"--over with --job {job}: cannot be swept. Choose one of {', '.join(sweep.JOBS)}")
    options["over"] = tuple(options.get("over", ()))
    if not options["config_name"]:
        what = "TOOL" if job == "convert" else "CONFIG"
        raise UsageError(f"{what} is missing: {_PROGRAM} {what} --cluster {options['cluster']} ...")
    return Options(**options, args=tuple(rest))


def read_request(options: Options) -> Request:
    """Load configuration and cluster. Raises their loaders' errors, and SystemExit for an unknown field."""
    cluster = clusters.load(options.cluster)
    target = jobs.read(options.job, options.config_name, options.args)
    chosen = {"job": options.job, "config_name": options.config_name, "nodes": options.nodes}
    return Request(cluster=cluster, **chosen, **vars(target))


def launch(options: Options, request: Request) -> int:
    """Plan the job; then print, queue or reject it. Returns the exit status."""
    plan, problems, warnings = check(options, request)
    if not _show(problems, warnings) or plan.spec is None:
        return 2
    return _start(options, plan.spec, request)


def check(options: Options, request: Request) -> tuple[Plan, list[str], list[Finding]]:
    """(plan, problems, warnings). With problems, nothing may be queued."""
    plan = jobs.plan(request)
    cluster, spec = request.cluster, plan.spec
    problems, texts = list(plan.problems), list(plan.warnings)
    (texts if options.dry_run else problems).extend(map(str, cluster.missing_files()))
    warnings = [Finding("warning", "", text) for text in texts]
    if spec is None:
        return plan, problems, warnings
    problems += slurm.problems(spec, cluster) if cluster.kind == "slurm" else spec.problems()
    if cluster.kind == "slurm" and request.cfg is not None:
        problems += user_files.unreachable(request.cfg, cluster, spec.run_dir)
    if not options.dry_run and not problems:
        problems += in_use.problems(spec, cluster.sbatch)
        if options.job in ("train", "rl") and request.cfg is not None:
            report, findings = data_check.look_at_data(request.cfg)
            print("\n".join(report))
            problems += [finding.problem for finding in findings if finding.severity == "error"]
            warnings += [finding for finding in findings if finding.severity == "warning"]
    return plan, problems, warnings


def _show(problems: Sequence[str], warnings: Sequence[Finding]) -> bool:
    for finding in warnings:
        print(data_check.shown(finding, sys.stderr), file=sys.stderr)
    if problems:
        noun = "problem" if len(problems) == 1 else "problems"
        print(f"{_PROGRAM}: {len(problems)} {noun}, nothing is queued:", file=sys.stderr)
        for number, text in enumerate(problems, 1):
            print(f"  {number}. {text}", file=sys.stderr)
    return not problems


def _start(options: Options, spec: JobSpec, request: Request) -> int:
    if options.dry_run:
        print(_dry_run_text(options, spec, request))
        return 0
    return _local(options, spec) if request.cluster.kind == "local" else _slurm(options, spec, request)


def _sweep(options: Options) -> int:
    """Queue one job per combination of values, after all combinations pass the checks."""
    first_name = dict(options.over).get("config", (options.config_name,))[0]
    first = read_request(dataclasses.replace(options, config_name=first_name))
    assert first.cfg is not None
    is_local = first.cluster.kind == "local"
    folder = f"{absolute_run_dir(first.cfg, first.cluster).rstrip('/')}_sweep"
    ready, problems, warnings = [], [], []
    for index, label in enumerate(sweep.labels(options.over)):
        args = (*options.args, *sweep.overrides(label, folder, index))
        config_name = dict(label).get("config", options.config_name)
        # Local runs share the GPUs, so they run one after another. Slurm jobs are awaited together below.
        single = dataclasses.replace(options, over=(), args=args, config_name=config_name, wait=is_local)
        request = read_request(single)
        plan, new_problems, new_warnings = check(single, request)
        problems += [f"{sweep.format_label(label)}: {text}" for text in new_problems]
        for finding in new_warnings:
            problem = f"{sweep.format_label(label)}: {finding.problem}"
            warnings.append(dataclasses.replace(finding, problem=problem))
        ready.append((single, plan.spec, request))
    if not _show(problems, warnings):
        return 2
    if not options.dry_run:
        sweep.note(folder, options.over)
    planned = [(single, spec, request) for single, spec, request in ready if spec is not None]
    try:
        status = max(_start(*each) for each in planned)
    except BaseException:
        if not any(read_jobs(spec.run_dir) for _, spec, _ in planned):
            sweep.forget(folder)
        raise
    if not options.dry_run:
        print(f"table:  {_PROGRAM}.sweep {shlex.quote(folder)}")
    if options.wait and not is_local:
        specs = {read_jobs(spec.run_dir)[-1]["job_id"]: spec for _, spec, _ in planned}
        return _show_ends(slurm.wait(list(specs)), specs)
    return status


def _show_ends(states: dict[str, str], specs: dict[str, JobSpec]) -> int:
    """Print the states of ended jobs, and the first error of each that failed; returns the exit status."""
    print("\n".join(f"job {job_id}: {state}" for job_id, state in states.items()), flush=True)
    for job_id, state in states.items():
        if state not in ("COMPLETED", "CANCELLED"):
            _show_first_error(specs[job_id], job_id)
    return int(any(state != "COMPLETED" for state in states.values()))


def _dry_run_text(options: Options, spec: JobSpec, request: Request) -> str:
    """The script with a description of the job after the first line (the shebang)."""
    # Escape line breaks so that a value cannot add a command to the script.
    comments = ["# " + line.replace("\r", "\\r").replace("\n", "\\n") for line in lines(spec)]
    if request.cluster.kind == "local":
        agents = "1 agent" if spec.nodes == 1 else f"{spec.nodes} agents"
        return "\n".join([*comments, f"# {agents} on this machine: python -m launch.agent JOB.json"])
    first, _, rest = slurm.dry_run(spec, request.cluster, id=_id(options, spec)).partition("\n")
    return "\n".join([first, "#", *comments, rest.removesuffix("\n")])


def _id(options: Options, spec: JobSpec) -> str | None:
    return None if options.id is None else f"{slurm.slug(spec.name)}_{options.id}"


def _slurm(options: Options, spec: JobSpec, request: Request) -> int:
    job_id = slurm.submit(spec, request.cluster, cluster_name=options.cluster, id=_id(options, spec))
    _show_launched(f"job {job_id} is queued on cluster {options.cluster!r}", spec)
    if not options.wait:
        return 0
    try:
        states = slurm.wait([job_id])
    except KeyboardInterrupt:
        print("no longer waiting; the job continues", file=sys.stderr)
        return 1
    return _show_ends(states, {job_id: spec})


def _local(options: Options, spec: JobSpec) -> int:
    try:
        job_id, process = local.start(spec, cluster_name=options.cluster)
    except OSError as error:
        print(f"{_PROGRAM}: cannot create the run's folder {spec.run_dir!r}: {error}", file=sys.stderr)
        return 2
    _show_launched(f"job {job_id} has started on this machine", spec)
    if not options.wait:
        return 0
    try:
        status = process.wait()
    except KeyboardInterrupt:
        print("no longer waiting; the job continues", file=sys.stderr)
        return 1
    states = {0: "COMPLETED", CANCELLED: "CANCELLED", SAVED: "saved, stopped on request"}
    print(f"job {job_id}: {states.get(status, f'FAILED with status {status}')}")
    if status not in states:
        _show_first_error(spec, job_id)
    return int(status != 0)


def _show_launched(headline: str, spec: JobSpec) -> None:
    run = shlex.quote(spec.run_dir)
    print(headline)
    print("\n".join(line for line in lines(spec) if not line.startswith("    ")))
    if (report := report_name(spec)) is not None:
        print(f"report: {spec.run_dir}/{report}")
    print(f"watch:  {_PROGRAM} status {run}\n        {_PROGRAM} logs {run} --follow\n        {_PROGRAM} cancel {run}")
    sys.stdout.flush()


def _show_first_error(spec: JobSpec, job_id: str) -> None:
    """Print the first error of the job, or where to find its logs."""
    attempts = sorted(launch_dir(spec.run_dir).glob(f"{job_id}.*"))
    errors = [path for attempt in attempts if (path := error_file(attempt)) is not None]
    if errors:
        text = f"first error of job {job_id} ({errors[0]}):\n{errors[0].read_text(errors='replace').strip()}"
    elif not attempts and not job_id.startswith("local-"):
        text = no_output_message(spec.run_dir, job_id)
    else:
        text = f"it left no error; `{_PROGRAM} logs {shlex.quote(spec.run_dir)}` shows its logs"
    print(text, file=sys.stderr)
