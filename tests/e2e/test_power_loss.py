"""A power loss at any moment leaves a checkpoint that loads: writes are recorded by strace and replayed up to each one.

After each prefix of the operations, four disks are built: data that were not synced are there or are lost, and names
in folders that were not synced are there or are not. No file may be damaged under a final name in any of them.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

import pytest

from megatron_fp8rl.data.checkpoint_dir import complete, damaged_files, missing_part
from megatron_fp8rl.observe.recording import read_step, steps_of

ROOT = Path(__file__).resolve().parents[2]
_CALLS = (
    "openat,creat,lseek,write,pwrite64,writev,pwritev,pwritev2,sendfile,copy_file_range,fsync,fdatasync,rename,renameat,"
    "renameat2,mkdir,mkdirat,unlink,unlinkat,rmdir,ftruncate,truncate,link,linkat,symlink,symlinkat"
)
_LINE = re.compile(r"(\d+) +(\w+)\((.*)\) += (-?\d+)(?:<((?:\\x[0-9a-f]{2})*)>)?.*")
_TEXT = re.compile(r'"((?:\\x[0-9a-f]{2})*)"')
_OPENED = re.compile(r"(\d+)<((?:\\x[0-9a-f]{2})*)>")


@dataclass(eq=False)
class Node:
    """A file or folder: its state in the kernel, and its guaranteed state on disk."""

    data: bytearray | None = None  # None: a folder
    synced: bytes = b""
    names: dict[str, Node] = field(default_factory=dict)
    synced_names: dict[str, Node] = field(default_factory=dict)

    def sync(self) -> None:
        if self.data is None:
            self.synced_names = dict(self.names)
        else:
            self.synced = bytes(self.data)

    def write_to(self, path: Path, *, all_data: bool, all_names: bool) -> None:
        if self.data is not None:
            path.write_bytes(self.data if all_data else self.synced)
            return
        path.mkdir()
        for name, node in (self.names if all_names else self.synced_names).items():
            node.write_to(path / name, all_data=all_data, all_names=all_names)


class Disk:
    """The recorded folder, operation by operation."""

    def __init__(self, root: Path):
        self.root, self.top = root, Node()
        self.offsets: dict[tuple[int, str], int] = {}  # by descriptor and path: descriptors are not shared here

    def node(self, path: Path) -> Node:
        result = self.top
        for part in path.relative_to(self.root).parts:
            result = result.names[part]
        return result

    def apply(self, call: str, arguments: str, result: int, opened: str) -> bool:
        """Whether the call concerned the folder and changed something. Raises AssertionError for calls not modelled."""
        texts = [bytes.fromhex(text.replace("\\x", "")) for text in _TEXT.findall(arguments)]
        of = _OPENED.match(arguments)
        handle = (int(of[1]), _path(of[2])) if of else (-1, "")
        if call in ("openat", "creat"):
            return self._open(_path(opened), (result, _path(opened)), arguments)
        if call in ("lseek", "write", "pwrite64", "fsync", "fdatasync", "ftruncate"):
            return self._is_inside(handle[1]) and self._on_file(call, handle, arguments, texts, result)
        paths = [Path(text.decode()) for text in texts]
        inside = [path for path in paths if self._is_inside(str(path))] or [
            Path(p) for p in [handle[1]] if self._is_inside(p)
        ]
        if not inside:
            return False
        assert call in ("rename", "renameat", "renameat2", "mkdir", "mkdirat", "unlink", "unlinkat", "rmdir"), call
        if not paths[0].is_absolute():  # unlinkat and openat of a removed tree
            paths = [Path(handle[1], paths[0])]
        self._on_name(call, paths)
        return True

    def _is_inside(self, path: str) -> bool:
        return path == str(self.root) or path.startswith(f"{self.root}/")

    def _open(self, path: str, handle: tuple[int, str], arguments: str) -> bool:
        if not self._is_inside(path):
            return False
        self.offsets[handle] = 0
        if path == str(self.root):
            return False
        folder, name = self.node(Path(path).parent), Path(path).name
        if "O_CREAT" in arguments and name not in folder.names:
            folder.names[name] = Node(bytearray())
            return True
        if "O_TRUNC" in arguments:
            folder.names[name].data = bytearray()
        if "O_APPEND" in arguments:
            self.offsets[handle] = len(folder.names[name].data)
        return "O_TRUNC" in arguments

    def _on_file(self, call: str, handle: tuple[int, str], arguments: str, texts: list[bytes], result: int) -> bool:
        node = self.node(Path(handle[1]))
        if call == "lseek":
            self.offsets[handle] = result
        elif call in ("fsync", "fdatasync"):
            node.sync()
        elif call == "ftruncate":
            size = int(arguments.rpartition(",")[2])
            node.data = node.data[:size] + bytes(max(0, size - len(node.data)))
        else:
            start = int(arguments.rpartition(",")[2]) if call == "pwrite64" else self.offsets[handle]
            node.data.extend(bytes(max(0, start - len(node.data))))
            node.data[start : start + result] = texts[0][:result]
            if call == "write":
                self.offsets[handle] = start + result
        return call != "lseek"

    def _on_name(self, call: str, paths: list[Path]) -> None:
        folder, name = self.node(paths[0].parent), paths[0].name
        if call.startswith("mkdir"):
            folder.names[name] = Node()
        elif call.startswith("rename"):
            moved = folder.names.pop(name)
            self.node(paths[1].parent).names[paths[1].name] = moved
        else:
            del folder.names[name]


def _path(text: str | None) -> str:
    return bytes.fromhex((text or "").replace("\\x", "")).decode()


def calls_of(trace: Path) -> Iterator[tuple[str, str, int, str]]:
    """(call, arguments, result, path that was opened) of every call that succeeded, in their order of completion."""
    unfinished: dict[str, str] = {}
    with trace.open() as lines:
        for line in lines:
            line = line.rstrip("\n")
            pid = line.partition(" ")[0]
            if line.endswith("<unfinished ...>"):
                unfinished[pid] = line.removesuffix("<unfinished ...>")
                continue
            if "resumed>" in line:
                line = unfinished.pop(pid) + line.partition("resumed>")[2]
            match = _LINE.fullmatch(line)
            if match and int(match[4]) >= 0:
                yield match[2], match[3], int(match[4]), match[5] or ""


def problems(folder: Path, acknowledged: int) -> list[str]:
    """Damaged files under final names, and lost steps that had been saved."""
    result, steps = [], [0]
    for path in complete(folder / "checkpoints"):
        wrong = missing_part(path) or damaged_files(path, 0, 1)
        result += [f"{path.name}: {wrong}"] if wrong else []
        steps += [] if wrong else [int(path.name.removeprefix("step_"))]
    if max(steps) < acknowledged:
        result.append(f"step {acknowledged} was saved, and {max(steps)} is there")
    for step, path in steps_of(folder / "rollouts").items():
        try:
            assert len(read_step(path)) == 1
        except ValueError as error:
            result.append(f"rollouts of step {step}: {error}")
    return result


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace, which records the writes, is not installed")
def test_a_power_loss_at_any_moment_leaves_what_was_saved(tmp_path):
    trace, root, disk_dir = tmp_path / "trace", tmp_path / "out", tmp_path / "disk"
    command = [
        *"strace -f --seccomp-bpf -o".split(),
        str(trace),
        *"-y -s".split(),
        str(100_000_000),
        *"-xx -e".split(),
        f"trace={_CALLS}",
        sys.executable,
        *"-m tests.e2e.power_loss_script".split(),
        str(root),
    ]
    root.mkdir()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    if "ptrace" in done.stderr and "not permitted" in done.stderr:
        pytest.skip("this machine lets nobody trace processes")
    assert done.returncode == 0, done.stderr[-3000:]
    disk, acknowledged, num_states, seen = Disk(root), 0, 0, set()
    for call in calls_of(trace):
        if not disk.apply(*call):
            continue
        acknowledged = max(
            [int(name.removeprefix("saved_")) for name in disk.top.names if name.startswith("saved_")] or [0]
        )
        for all_data, all_names in product((True, False), repeat=2):
            shutil.rmtree(disk_dir, ignore_errors=True)
            disk.top.write_to(disk_dir, all_data=all_data, all_names=all_names)
            wrong = problems(disk_dir, acknowledged)
            seen |= {(call[0], what) for what in wrong}
            assert not wrong, f"{call[0]}, data {all_data}, names {all_names}: {wrong}"
            num_states += 1
    assert acknowledged == 3 and num_states > 400
    for path in root.rglob("*"):  # the replay is the run
        assert path.is_dir() or disk.node(path).data == path.read_bytes(), path
