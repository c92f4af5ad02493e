"""From a laptop: what a login node is asked, and given, over SSH.

In: a cluster with a ``tunnel``. Out: answers of its login node, jobs in its queue, the output of ``status``, ``logs``
and ``cancel`` that run there. The standard library and the ``ssh`` of this machine, which decides as it always does:
about names of ``~/.ssh/config``, keys, agents, jump hosts and ``known_hosts``. It never asks a person; what it would
ask is an error that says what to do. The login node needs bash, tar and Slurm, and a Python to look after runs.

A program travels as one word that no login shell changes, and runs in bash as after a login, so that it finds what a
user finds there. What the shell's own files print is cut off in front of a mark.
"""

from __future__ import annotations

import base64
import codecs
import io
import json
import re
import shlex
import subprocess
import sys
import tarfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

from launch.cluster import Cluster, Tunnel
from launch.spec import jobs_file
from megatron_fp8rl.config import RunConfig, Violation

CONNECT_S = 15  # until a login node has answered at all
ANSWER_S = 60.0  # until it has done what it was asked
COPY_S = 300.0  # until it has the code as well
JOB = "@JOB@"  # stands for the number of a job in its record
_MARK = b"==> launch\n"
_LOST = 255  # exit status of ssh itself
_OLDEST_PYTHON = (3, 10)


class TunnelError(ValueError):
    """The login node cannot be reached, or does not answer. The message names the field of CLUSTER.tunnel."""


class LoginNodeError(RuntimeError):
    """The login node was reached, and a command there failed. The message is what it said."""


def run(tunnel: Tunnel, program: str, *, given: bytes = b"", deadline_s: float = ANSWER_S) -> str:
    """Output of a program of bash, which reads ``given``. Raises TunnelError, and LoginNodeError when it fails."""
    try:
        done = subprocess.run([*_ssh(tunnel), _word(program)], input=given, capture_output=True, timeout=deadline_s)
    except FileNotFoundError:
        raise TunnelError("CLUSTER.tunnel: this machine has no program `ssh`. Install OpenSSH's client.") from None
    except subprocess.TimeoutExpired:
        raise TunnelError(f"{_named(tunnel, 'host')}: no answer within {deadline_s:g} s. Is it busy?") from None
    said = done.stderr.decode(errors="replace")
    if done.returncode == _LOST:
        raise TunnelError(_why(tunnel, said))
    if done.returncode:
        raise LoginNodeError(said.strip() or f"exit status {done.returncode}")
    return done.stdout.partition(_MARK)[2].decode(errors="replace")


def ask(tunnel: Tunnel, *words: str) -> str | None:
    """Output of one command; None when it fails, or nobody answers."""
    try:
        return run(tunnel, shlex.join(words))
    except (TunnelError, LoginNodeError):
        return None


def missing(cluster: Cluster, cfg: RunConfig | None, others: Sequence[Violation] = ()) -> list[Violation]:
    """Files that the cluster's file or the configuration names and the cluster does not have; Slurm; a Python.

    All are asked for at once. ``others`` are what to say when the path in their value is not there either. Raises
    TunnelError.
    """
    tunnel = cluster.tunnel
    assert tunnel is not None
    if tunnel.identity is not None and not Path(tunnel.identity).expanduser().is_file():
        raise TunnelError(f"{_named(tunnel, 'identity')}: does not exist. Name the file of a private key.")
    questions = []
    for found in (*cluster.named_files(), *([] if cfg is None else _files_of(cfg)), *others):
        questions.append((f"[ -e {shlex.quote(found.value.partition(':')[0])} ]", found))
    root, python = cluster.run_root or "", login_python(cluster)
    questions.append((
        f"[ -d {shlex.quote(root)} ] && [ -w {shlex.quote(root)} ]",
        Violation("CLUSTER.run_root", root, "is no folder that you can write there", "Make it, or name another"),
    ))  # fmt: skip
    oldest = ".".join(map(str, _OLDEST_PYTHON))
    questions.append((
        f"{shlex.quote(python)} -c {shlex.quote(f'import sys; sys.exit(sys.version_info < {_OLDEST_PYTHON})')}",
        Violation("CLUSTER.tunnel.python", python, f"is no Python {oldest} or later on the login node, for status, "
                  "logs and cancel", "Name one"),
    ))  # fmt: skip
    questions.append((
        "command -v sbatch",
        Violation("CLUSTER.tunnel.host", tunnel.host, "has no sbatch after a login", "Name a login node of Slurm"),
    ))  # fmt: skip
    program = "\n".join(f"{{ {test}; }} > /dev/null 2>&1 || echo {i}" for i, (test, _) in enumerate(questions))
    return [questions[int(number)][1] for number in run(tunnel, program, given=b"").split()]


def _files_of(cfg: RunConfig) -> list[Violation]:
    """What a run reads, and what to say when it is not there."""
    found = []
    if cfg.model.hf_path is not None:
        path, remedy = f"{cfg.model.hf_path}/config.json", "Name a checkpoint's folder on the cluster"
        found.append(Violation("--model.hf_path", path, "does not exist on the cluster", remedy))
    if cfg.data.tokenizer != "character":
        path, remedy = cfg.data.tokenizer, 'Name a tokenizer\'s directory there, or "character"'
        found.append(Violation("--data.tokenizer", path, "does not exist on the cluster", remedy))
    if cfg.rollout.replay is not None:
        path, remedy = cfg.rollout.replay, "Name the folder rollouts of an earlier run there"
        found.append(Violation("--rollout.replay", path, "does not exist on the cluster", remedy))
    return found


def read_jobs(tunnel: Tunnel, run_dir: str) -> list[tuple[dict[str, Any], str | None]]:
    """The jobs of a run, each with its state while it waits or runs, else None. Raises TunnelError."""
    file = shlex.quote(str(jobs_file(run_dir)))
    program = f"[ ! -e {file} ] || cat {file}; echo {JOB}; squeue -h -u \"$(id -un)\" -o '%F %T'"
    try:
        text, _, queue = run(tunnel, program).partition(f"{JOB}\n")
    except LoginNodeError as error:
        raise TunnelError(f"{_named(tunnel, 'host')}: its Slurm does not answer: {error}") from error
    states = dict(line.split() for line in queue.splitlines())
    jobs = [json.loads(line) for line in text.splitlines()]
    return [(job, states.get(job["job_id"])) for job in jobs]


def submit(
    tunnel: Tunnel, launch_dir: Path, files: Path, *, id: str, experiment: str, tasks: Sequence[str]
) -> list[str]:
    """Copy what lies below ``files`` to ``launch_dir`` and queue its scripts, each after the one before; their numbers.

    There is ``code/<id>``, and for each task ``<experiment>/<task>_sbatch.sh`` and ``<task>.json``, the line of the
    run's file of jobs. When anything fails, nothing stays: neither jobs nor files. Raises TunnelError, LoginNodeError.
    """
    values = {"launch": str(launch_dir), "id": id, "experiment": f"{launch_dir}/{experiment}"}
    program = "\n".join(f"{name}={shlex.quote(value)}" for name, value in values.items())
    program += f"\ntasks={shlex.quote(' '.join(tasks))}\n{_SUBMIT}"
    return run(tunnel, program, given=_packed(files), deadline_s=COPY_S).split()


_SUBMIT = f"""
set -euo pipefail
if [ -e "$launch/code/$id" ]; then
    echo "error: there is a submission $id already in $launch: choose another --id" >&2
    exit 1
fi
jobs=
undo() {{
    status=$?
    set +e
    trap - EXIT
    [ -z "$jobs" ] || scancel $jobs
    rm -rf "$launch/code/$id" "$experiment"
    rmdir "${{experiment%/*}}" "$launch/experiments" "$launch/code" "$launch" "${{launch%/*}}" 2> /dev/null
    exit "$status"
}}
trap undo EXIT
trap 'exit 1' HUP INT TERM
mkdir -p "$launch"
tar -xzf - --no-same-owner -C "$launch"
previous=
for task in $tasks; do
    behind=${{previous:+--dependency=afterany:$previous}}
    job=$(sbatch --requeue --parsable $behind "$experiment/${{task}}_sbatch.sh")
    previous=${{job%%;*}}
    jobs="$jobs $previous"
done
set -- $jobs
for task in $tasks; do
    sed "s/{JOB}/$1/" "$experiment/$task.json" >> "$launch/jobs.jsonl"
    rm "$experiment/$task.json"
    shift
done
trap - EXIT
echo $jobs
"""


def watch(cluster: Cluster, command: str, name: str, options: Sequence[str]) -> int:
    """Run ``status``, ``logs`` or ``cancel`` on the login node, from the code that the run was submitted with.

    Its output is shown as it comes; an interrupt here ends the command there. Returns its exit status. Raises
    TunnelError when the login node cannot be reached, or is lost.
    """
    tunnel = cluster.tunnel
    assert tunnel is not None
    values = {"root": cluster.run_root or "", "name": name, "python": login_python(cluster), "command": command}
    program = "\n".join(f"{key}={shlex.quote(value)}" for key, value in values.items())
    program += f"\nset -- {shlex.join(options)}\n{_WATCH}"
    try:
        process = subprocess.Popen(
            [*_ssh(tunnel), _word(program)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
    except FileNotFoundError:
        raise TunnelError("CLUSTER.tunnel: this machine has no program `ssh`. Install OpenSSH's client.") from None
    said: list[bytes] = []
    assert process.stdout is not None and process.stderr is not None and process.stdin is not None
    reader = threading.Thread(target=lambda: said.append(process.stderr.read()), daemon=True)
    reader.start()
    try:
        _show(process.stdout)
        status = process.wait()
        reader.join(5.0)
    finally:
        process.stdin.close()  # which the login node takes for the end
        if process.poll() is None:
            process.terminate()
            process.wait(10.0)
    text = b"".join(said).decode(errors="replace")
    if status == _LOST:
        raise TunnelError(_why(tunnel, text))
    print(text, end="", file=sys.stderr)
    return status


# The shell that waits for the end of its input is the one sign that the laptop is gone.
_WATCH = """
cd -- "$root" || exit 2
code=
for run in "$name" "runs/$name"; do
    for each in "$run"/launch/code/*/; do
        if [ -d "$each" ] && { [ -z "$code" ] || [ "$each" -nt "$code" ]; }; then code=$each; fi
    done
    [ -z "$code" ] || break
done
if [ -z "$code" ]; then
    echo "python -m launch $command: $name is no run below $root that was launched from elsewhere" >&2
    exit 2
fi
run=$(cd -- "$run" && pwd)
cd -- "$code"
{ cat > /dev/null; kill -INT $$; } <&0 > /dev/null 2>&1 &
exec "$python" -u -m launch.watch "$command" "$run" "$@" < /dev/null
"""


def login_python(cluster: Cluster) -> str:
    """What runs ``status`` and the like on the login node: of a container, its Python is not there."""
    assert cluster.tunnel is not None
    return cluster.tunnel.python or (cluster.python if cluster.container_image is None else None) or "python3"


def _show(output: BinaryIO) -> None:
    for line in output:
        if line == _MARK:
            break
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    while chunk := output.read1(1 << 16):
        sys.stdout.write(decoder.decode(chunk))
        sys.stdout.flush()


def _ssh(tunnel: Tunnel) -> list[str]:
    """Everything in front of the program."""
    options = {
        "BatchMode": "yes",
        "LogLevel": "ERROR",
        "ConnectTimeout": CONNECT_S,
        "ServerAliveInterval": 15,
        "ServerAliveCountMax": 3,
    }
    words = ["ssh", "-T", *(f"-o{name}={value}" for name, value in options.items())]
    words += ["-p", str(tunnel.port)] if tunnel.port is not None else []
    words += ["-l", tunnel.user] if tunnel.user is not None else []
    words += ["-i", str(Path(tunnel.identity).expanduser())] if tunnel.identity is not None else []
    return [*words, "--", tunnel.host]


def _word(program: str) -> str:
    """What a login shell of any kind hands to bash unchanged."""
    text = base64.b64encode(f"printf '%s\\n' '{_MARK.decode().strip()}'\n{program}".encode()).decode()
    return f"""exec bash -lc 'eval "$(echo {text} | base64 -d)"'"""


def _packed(files: Path) -> bytes:
    """A compressed tar: one that is cut off is known by its checksum."""

    def nobody(entry: tarfile.TarInfo) -> tarfile.TarInfo:
        entry.uid = entry.gid = 0
        entry.uname = entry.gname = ""
        return entry

    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for path in sorted(files.iterdir()):
            tar.add(path, arcname=path.name, filter=nobody)
    return buffer.getvalue()


def _named(tunnel: Tunnel, name: str) -> str:
    return f"CLUSTER.tunnel.{name} = {getattr(tunnel, name)!r}"


def _why(tunnel: Tunnel, said: str) -> str:
    """What ssh said when it failed, with the field that it is about and what to do."""
    by_hand = shlex.join(word for word in _ssh(tunnel) if not word.startswith("-o") and word not in ("-T", "--"))
    last = "; ".join(line.strip(" .") for line in said.splitlines()[-2:] if line.strip()) or "nothing"
    if "IDENTIFICATION HAS CHANGED" in said:
        remedy = (
            "its host key is not the one in known_hosts. Ask the cluster's administrators; if it was changed by "
            f"them, remove the old one by `ssh-keygen -R` and connect once by `{by_hand}`"
        )
        return f"{_named(tunnel, 'host')}: {remedy}."
    for pattern, field, remedy in (
        (r"Host key verification failed|host key is known", "host",
         f"Its host key is not in known_hosts: connect once by `{by_hand}` and compare the fingerprint"),
        (r"Could not resolve|not known|name resolution", "host", "Name a login node, or a Host of ~/.ssh/config"),
        (r"timed out|No route|unreachable|Timeout", "host", "Does it need a VPN, or a ProxyJump in ~/.ssh/config?"),
        (r"refused|exchange|banner", "port", "Name the port at which its SSH listens"),
        (r"Permission denied|authentication", "identity" if tunnel.identity else "user",
         f"Make `{by_hand}` work without a question: by a key, an agent, or a ControlMaster that is open"),
    ):  # fmt: skip
        if re.search(pattern, said):
            return f"{_named(tunnel, field)}: ssh says: {last}. {remedy}."
    return f"{_named(tunnel, 'host')}: the connection failed; ssh says: {last}. Try `{by_hand}`."
