"""The lines of shell that a batch script has besides nemo-run's: bounded attempts, and what becomes of a job's end.

In: a job, and its place in a chain. Out: text. Pure.

nemo-run's own retries start a job again whatever ended it, and count no lost nodes. Here the agents decide, who know
whether a checkpoint was saved: their verdict is the file ``done``, which srun's exit status is not, since srun reports
the largest status of all nodes. 85 asks for another attempt; anything else ends the job with that status.

A chain is for clusters that do not requeue. Its jobs follow each other whatever ended the one before; once the run is
finished or has failed, files beside the chain's name tell the jobs behind to end at once.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from launch.outcome import CANCELLED
from launch.spec import SAVED, JobSpec


@dataclass(frozen=True, kw_only=True)
class Link:
    """One job of a chain; a job alone is a chain of one."""

    index: int = 0  # from 0
    length: int = 1
    chain: str = ""  # the same text in all jobs of the chain, fit for a file name

    @property
    def is_last(self) -> bool:
        return self.index + 1 == self.length


def setup_lines(spec: JobSpec, link: Link, *, log_dir: str, setup: tuple[str, ...]) -> str:
    """What runs on the first node before srun. ``log_dir`` holds the job's own output, ``sbatch-<job>.out``."""
    variables = [
        "# What became of an attempt is in the files of its agents.",
        "set +vx",
        f"launch_folder={spec.launch_dir_in_shell}",
        f"launch_chain={quoted(link.chain)}",
        f"launch_logs={quoted(log_dir)}",
        f"max_restarts={spec.max_restarts}",
        "attempt=${SLURM_RESTART_COUNT:-0}",
        'attempt_folder="$launch_folder/$SLURM_JOB_ID.$attempt"',
    ]
    saved = _REQUEUE if link.length == 1 else _LAST_OF_CHAIN if link.is_last else _GO_ON
    end = _END.replace("@SAVED@", str(SAVED)).replace("@CANCELLED@", str(CANCELLED))
    end = end.replace("@AGAIN@", saved.strip("\n"))
    parts = ["\n".join(variables), end, _BOUND, *([_SKIP] if link.index else [])]
    if setup:
        parts.append("# Of the cluster's file.\n" + "\n".join(setup))
    return "\n".join(part.strip("\n") for part in parts) + "\n"


def quoted(text: str) -> str:
    """One word for a POSIX shell."""
    return shlex.quote(text)


_END = """
launch_end() {
    status=$?
    set +e
    trap - EXIT
    end=
    if [ -r "$attempt_folder/done" ]; then
        read -r status < "$attempt_folder/done"
    fi
    case $status in
        0)
            end=finished ;;
        @SAVED@)
@AGAIN@
            ;;
        '' | *[!0-9]*)
            status=1 end=failed ;;
        *)
            end=failed ;;
    esac
    mkdir -p "$attempt_folder"
    if [ "$end" = failed ] && [ "$status" != @CANCELLED@ ] && [ ! -e "$attempt_folder/first_error.txt" ]; then
        # The agents did not get as far: what srun and the container say is all that there is.
        {
            cat "$launch_logs/log-agents_${SLURM_JOB_ID}_$attempt.out"
            sed '1,/^+ set +vx$/d' "$launch_logs/sbatch-$launch_this.out" | tail -n 40
        } > "$attempt_folder/first_error.txt" 2> /dev/null
        if [ ! -s "$attempt_folder/first_error.txt" ]; then
            echo "no log is left in $launch_logs: was the run's folder moved or removed?" > "$attempt_folder/first_error.txt"
        fi
    fi
    if [ -n "$end" ]; then
        echo "$SLURM_JOB_ID $status" > "$launch_folder/$launch_chain.$end"
    fi
    if [ "$status" = @CANCELLED@ ]; then
        scancel "$launch_this"  # so that Slurm calls it cancelled, and not failed
    fi
    exit "$status"
}
# One element of an array: the number of its last one is also that of all.
launch_this=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
launch_this=${launch_this:-$SLURM_JOB_ID}
trap launch_end EXIT
"""

# Slurm itself starts a job again that was preempted or lost a node; one that was cancelled must stay so.
_REQUEUE = """
            if [ "$attempt" -ge "$max_restarts" ]; then
                echo "launch: saved, but max_restarts = $max_restarts attempts are used up; submit the run again" >&2
                end=failed
            elif scontrol -o show job "$launch_this" | grep -q ' JobState=RUNNING '; then
                echo "launch: attempt $attempt has saved; the job is queued again" >&2
                scontrol requeue "$launch_this" || end=failed
            fi
"""

_LAST_OF_CHAIN = """
            echo "launch: saved, but this was the last job of the chain; submit the run again" >&2
            end=failed
"""

_GO_ON = """
            echo "launch: saved; the next job of the chain goes on" >&2
            status=0
"""

_BOUND = """
if [ "$attempt" -gt "$max_restarts" ]; then
    echo "launch: attempt $attempt is not started: max_restarts = $max_restarts" >&2
    exit 1
fi
"""

_SKIP = """
if [ -e "$launch_folder/$launch_chain.finished" ]; then
    echo "launch: an earlier job of this chain has finished the run" >&2
    trap - EXIT
    exit 0
fi
if [ -e "$launch_folder/$launch_chain.failed" ]; then
    echo "launch: an earlier job of this chain has failed: $(cat "$launch_folder/$launch_chain.failed")" >&2
    trap - EXIT
    exit 1
fi
"""
