"""The ``report`` command, which also compares two runs, and the reports that other commands write at their end."""

import sys
from dataclasses import dataclass
from pathlib import Path

from megatron_fp8rl import cli
from megatron_fp8rl.config import RunConfig


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """Options of the report command."""

    run_dir: str = "runs/demo"  # folder of a run, finished or not
    other_dir: str | None = None  # folder of a second run: name the first value that differs, without a report


def _run(invocation: cli.Invocation) -> int:
    if invocation.options.other_dir is not None:
        return _compare(invocation.options)
    from megatron_fp8rl.report.run_report import write_report

    try:
        print(write_report(Path(invocation.options.run_dir)))
    except FileNotFoundError as error:
        print(f"report: {error}. Name the folder of a run: report RUN_DIR", file=sys.stderr)
        return 2
    return 0


def _compare(options: ReportOptions) -> int:
    """Print whether two runs are equal; exit status 1 if they are not."""
    from megatron_fp8rl.report.repetition import compare_results

    try:
        comparison = compare_results(options.run_dir, options.other_dir)
    except (FileNotFoundError, ValueError) as error:
        print(f"report: {error}. Name the folders of two runs: report RUN_DIR OTHER_DIR", file=sys.stderr)
        return 2
    print("\n".join(comparison.lines))
    return 0 if comparison.is_equal else 1


def write_reports(cfg: RunConfig) -> None:
    """Write the reports of a run and of its warm start, finished or failed, and name the exported weights. A failing
    report does not fail the run."""
    from megatron_fp8rl.report.run_report import write_report
    from megatron_fp8rl.sft_loop import WARM_START

    for folder in (Path(cfg.run_dir, WARM_START), Path(cfg.run_dir)):
        try:
            page = write_report(folder)
        except FileNotFoundError:  # no run started there
            continue
        except Exception as error:
            print(f"the report of {folder} could not be written: {error!r}", file=sys.stderr, flush=True)
            continue
        if cfg.observe.display != "none":
            print(f"report: {page}", flush=True)
    run_dir = Path(cfg.run_dir)
    if cfg.observe.display != "none" and (run_dir / "done.json").exists() and (run_dir / "hf").is_dir():
        print(f"weights, as a Hugging Face folder: {run_dir / 'hf'}", flush=True)


COMMAND = cli.Command(
    name="report",
    summary="write report.html of a run, or compare the values of two runs",
    run=_run,
    takes_config=False,
    options=ReportOptions,
)
