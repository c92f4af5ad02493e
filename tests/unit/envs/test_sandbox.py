"""What a program can do in a sandbox: nothing to anybody else. Each attack ends alone; run with -s for the table."""

import os
import subprocess
import sys
import time

import pytest

from megatron_fp8rl.envs import sandbox

pytestmark = pytest.mark.skipif(bool(sandbox.problem()), reason=sandbox.problem())

ATTACKS = {  # program -> what it may say, or how it ends
    "fork bomb": ("import os\nwhile True: os.fork()", "Resource temporarily unavailable|deadline"),
    "100 GB": ("x = bytearray(100 << 30)", "MemoryError"),
    "endless loop": ("while True: pass", "deadline|SIGXCPU|SIGKILL"),
    "network": ("import socket\nsocket.create_connection(('1.1.1.1', 53), 2)", "unreachable"),
    "local network": ("import socket\nsocket.create_connection(('127.0.0.1', 22), 2)", "refused"),
    "passwords": ("open('/etc/passwd')", "No such file"),
    "write": ("open('/usr/bin/python', 'w')", "Read-only|denied|No such"),
    "write beside its Python": ("import sys\nopen(sys.prefix + '/x', 'w')", "Read-only|denied"),
    "kill others": ("import os\nos.kill(-1, 9)", "No such process"),
    "kill the parent": (
        "import os\nassert os.getppid() <= 1\nos.kill(os.getppid(), 9)\nraise SystemExit('lives')",
        "lives|denied|not permitted",
    ),
    "1 GB of output": ("import sys\nwhile True: sys.stdout.write('x' * 65536)", "File too large|SIGXFSZ"),
    "fill the disk": (
        "for i in range(1000):\n  with open(f'/tmp/{i}', 'wb') as f: f.write(b'x' * (8 << 20))",
        "No space left",
    ),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_ends_alone(name):
    program, expected = ATTACKS[name]
    started = time.monotonic()
    limits = sandbox.Limits(cpu_s=2, tmp_bytes=32 << 20)
    actual = sandbox.run([sys.executable, "-I", "-c", program], deadline_s=4.0, limits=limits)
    seconds = time.monotonic() - started
    print(f"\n| {name} | {actual.reason.splitlines()[-1] if actual.reason else 'ends'} | {seconds:.2f} s |")
    assert actual.status != 0 and seconds < 20
    assert any(part in actual.reason for part in expected.split("|")), actual
    assert len(actual.stdout) <= limits.file_bytes
    assert sandbox.run(["/bin/echo", "on"], deadline_s=20).stdout == "on\n"


def test_files_of_others_are_not_there(tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("key")
    for folder in (tmp_path, *tmp_path.parents[:-2]):
        folder.chmod(0o755)  # so that permissions are not what protects it
    read = f"print(open({str(secret)!r}).read())"
    assert subprocess.run([sys.executable, "-c", read], capture_output=True, text=True).stdout == "key\n"
    actual = sandbox.run([sys.executable, "-I", "-c", read], deadline_s=20)
    assert actual.stdout == "" and "No such file" in actual.reason


def test_the_environment_is_empty(monkeypatch):
    monkeypatch.setenv("SECRET", "x")
    actual = sandbox.run(
        [sys.executable, "-I", "-c", "import os; print(sorted(os.environ), os.getuid())"], deadline_s=20
    )
    names = actual.stdout.rpartition(" ")
    assert "SECRET" not in names[0] and (os.getuid() != 0 or names[2].strip() == "65534")


def test_input_packages_and_readable_folders(tmp_path):
    tmp_path.chmod(0o755)  # programs of root run as nobody
    (tmp_path / "data.txt").write_text("here")
    program = f"import numpy, sys; print(sys.stdin.read(), open({str(tmp_path / 'data.txt')!r}).read())"
    actual = sandbox.run([sys.executable, "-I", "-c", program], stdin="in", deadline_s=20, readable=(str(tmp_path),))
    assert actual.stdout == "in here\n", actual


def test_without_user_namespaces_it_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(
        sandbox, "run", lambda *args, **kwargs: sandbox.Finished(status=1, stdout="", stderr="no namespaces")
    )
    sandbox.problem.cache_clear()
    try:
        with pytest.raises(sandbox.SandboxError, match="no namespaces.*unprivileged_userns_clone = 1"):
            sandbox.require()
    finally:
        sandbox.problem.cache_clear()
