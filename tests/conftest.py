"""Settings that all tests share. They must be in the environment before torch is imported."""

import os
import random
import sys
from pathlib import Path
from typing import Any

import pytest

# Many ranks share few cores: more than one thread each makes them wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Nothing here is worth compiling, and a compiler may be missing.
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# A package that vLLM's command line imports raises the root logger and its handlers to this level; by default to ERROR.
os.environ.setdefault("SAGEMAKER_CONTAINER_LOG_LEVEL", "WARNING")

ROOT = str(Path(__file__).resolve().parents[1])
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)

import absl.logging  # noqa: E402  what is above comes first

from megatron_fp8rl.trainer.compat import megatron_on_cpu  # noqa: E402

megatron_on_cpu.install()

# The first import of vLLM configures logging, and so closes the stream of absl's handler: the one that pytest captures.
absl.logging.get_absl_handler().python_handler.stream = sys.__stderr__


@pytest.fixture(autouse=True)
def same_random_numbers() -> None:
    """Seed Python and torch, because other workers run other tests before this one."""
    random.seed(0)
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(0)


_ORDER = ("tests/slurm/", "tests/e2e/", "tests/dist/")  # what takes longest comes first, lest it be waited for alone
_TOGETHER = ("tests/slurm/", "tests/gpu/", "tests/multi_gpu/")  # one after the other: they share a cluster, or a GPU


@pytest.hookimpl(optionalhook=True)  # without pytest-xdist, too, tests run: one after the other
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With ``-n``: tests of a file share a process, because they share engines and models."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            path = nodeid.partition("::")[0]
            return next((folder for folder in _TOGETHER if path.startswith(folder)), path)

    config.option.loadscopereorder = False
    return ByFile(config, log)


# What `make test` runs without a mark. `core` adds single tests of other folders; `slow` leaves one out.
_QUICK = ("tests/unit/", "tests/test_")
_BY_HAND = "tests/unit/benchmarks/"  # programs that people run by hand


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip files without tests of `make test` or `make test-rest`: importing all takes each process a minute."""
    selected = config.option.markexpr
    if selected not in ("not slow", "slow") or collection_path.suffix != ".py":
        return None
    name = collection_path.relative_to(ROOT).as_posix()
    is_quick = name.startswith(_QUICK) and not name.startswith(_BY_HAND)
    if selected == "slow":
        marks = ("mark.slow", "mark.long")
        return True if is_quick and not any(m in collection_path.read_text(encoding="utf-8") for m in marks) else None
    return None if is_quick or "mark.core" in collection_path.read_text(encoding="utf-8") else True


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """With ``--cov``: line coverage of megatron_fp8rl, and its ten least covered packages."""
    if not config.getoption("cov_source", None) or config.getoption("no_cov", False):
        return
    import coverage

    measured = coverage.Coverage()
    measured.load()
    lines: dict[str, list[int]] = {}  # package -> [lines, lines that no test ran]
    for path in (Path(ROOT) / "megatron_fp8rl").rglob("*.py"):
        _, statements, _, missing, _ = measured.analysis2(str(path))
        for package in (path.parent.relative_to(ROOT).as_posix(), "total"):
            counts = lines.setdefault(package, [0, 0])
            counts[0] += len(statements)
            counts[1] += len(missing)
    covered = {name: 100 * (1 - missing / total) for name, (total, missing) in lines.items() if total}
    terminalreporter.section(f"line coverage of megatron_fp8rl: {covered.pop('total'):.1f} %; least covered packages")
    for name in sorted(covered, key=covered.__getitem__)[:10]:
        terminalreporter.write_line(f"{covered[name]:5.1f} %  {name}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort long tests first, mark what `make test` leaves out as slow, and skip tests of minutes by default."""
    for item in items:
        is_quick = item.nodeid.startswith(_QUICK) and not item.nodeid.startswith(_BY_HAND)
        if item.nodeid.startswith(("tests/gpu/", "tests/multi_gpu/")):
            item.add_marker(pytest.mark.gpu)
        is_left_out = item.get_closest_marker("long") or not (is_quick or item.get_closest_marker("core"))
        if is_left_out and not item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.slow)
    items.sort(key=lambda item: next((i for i, name in enumerate(_ORDER) if item.nodeid.startswith(name)), len(_ORDER)))
    if os.environ.get("FP8RL_LONG_TESTS") == "1":
        return
    for item in items:
        if item.get_closest_marker("long"):
            item.add_marker(pytest.mark.skip(reason="takes minutes; FP8RL_LONG_TESTS=1 runs it"))
