"""What the terminal shows."""

import io
import re
import subprocess
import sys

import pytest

from megatron_fp8rl.observe import display as display_module
from megatron_fp8rl.observe.display import (
    LiveDisplay,
    PlainDisplay,
    duration,
    headline,
    make_display,
    phase_times,
    sparkline,
    wrapped,
)
from tests.helpers.terminal import Terminal

METRICS = {
    "reward/score/mean": 0.5,
    "mismatch/abs_logprob_diff/mean": 0.0123,
    "time/step/s": 2.0,
    "time/update/s": 1.25,
    "time/rollouts/s": 0.5,
    "time/generate/s": 0.4,
}


def test_a_sparkline_goes_from_low_to_high_and_shows_gaps():
    assert sparkline([0.0, 1.0]) == "▁█"
    assert sparkline([0.0, float("nan"), 1.0], low=0.0) == "▁ █"
    assert sparkline([0.5, 0.5], low=0.0) == "██"
    assert sparkline([]) == ""
    assert len(sparkline([float(i) for i in range(1000)], width=60)) == 60


@pytest.mark.parametrize(("seconds", "text"), [(4.4, "4s"), (75, "1m 15s"), (59.9, "1m 00s"), (7325, "2h 02m")])
def test_durations(seconds, text):
    assert duration(seconds) == text


def test_phases_are_shown_in_the_order_of_the_loop_and_spans_beside_them_are_not():
    assert phase_times(METRICS) == ["rollouts 0.50", "update 1.25"]


def test_live_becomes_plain_where_there_is_no_terminal(monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert isinstance(make_display("live", "run", 10), PlainDisplay)


def test_plain_lines_hold_the_numbers_and_the_last_step_is_never_left_out(capsys):
    display = make_display("plain", "run", 3)
    display.start()
    for step in (1, 2, 3):
        display.show_step(step, METRICS)
    display.stop()
    lines = capsys.readouterr().out.splitlines()
    assert [line[:7] for line in lines] == ["run 1/3", "run 3/3"]  # within a second, step 2 is passed over
    assert "reward 0.500  mismatch 1.23e-02" in lines[0]


def remaining_times(monkeypatch, seconds, num_steps, first=1) -> list[str]:
    """The remaining time in the line of each step, of a run whose steps take ``seconds``."""
    lines = plain_lines(monkeypatch, seconds, num_steps, first)
    return [line.split("  ")[-1] if line.endswith(" left") else "" for line in lines]


def plain_lines(monkeypatch, seconds, num_steps, first=1, eval_every=0) -> list[str]:
    clock, lines = [100.0], []
    monkeypatch.setattr(display_module, "monotonic", lambda: clock[0])
    monkeypatch.setattr("builtins.print", lambda line, **_: lines.append(line))
    display = PlainDisplay("run", num_steps)
    display.start()
    for step, step_s in enumerate(seconds, first):
        clock[0] += step_s
        display.show_step(step, {"eval/pass_rate/mean": 0.5} if eval_every and step % eval_every == 0 else {})
    return lines


def test_slow_steps_that_compile_kernels_do_not_count_in_the_remaining_time(monkeypatch):
    # Mean of steps 2 to 8: 15 s, which would be 23 minutes.
    assert remaining_times(monkeypatch, [60, 36, 2, 2, 22, 2, 2, 39], 100)[1:] == [
        "58m 48s left",  # a single step is all that is known
        "3m 14s left",
        "3m 12s left",
        "3m 10s left",
        "3m 08s left",
        "3m 06s left",
        "3m 04s left",
    ]


def test_the_first_step_gives_no_remaining_time_and_the_last_gives_none_left(monkeypatch):
    assert remaining_times(monkeypatch, [60, 2, 2], 3) == ["", "2s left", "0s left"]


def test_a_resumed_run_counts_its_own_steps(monkeypatch):
    assert remaining_times(monkeypatch, [60, 4], 100, first=50)[-1] == "3m 16s left"


def test_the_remaining_time_follows_steps_that_become_slower_for_good(monkeypatch):
    assert remaining_times(monkeypatch, [60, *[2] * 30, *[6] * 20], 100)[-1] == "4m 54s left"


def test_a_day_of_quick_steps_fits_a_log_and_evaluations_are_always_in_it(monkeypatch):
    num_steps = 24 * 3600 * 4
    lines = plain_lines(monkeypatch, [0.25] * num_steps, num_steps, eval_every=86_400 - 1)
    assert 9_000 < len(lines) < 11_000, "a line each second would be 86,400"
    evaluated = [int(re.search(r"run (\d+)/", line)[1]) for line in lines if "eval pass rate" in line]
    assert evaluated == [86_399, 2 * 86_399, 3 * 86_399, 4 * 86_399]
    assert lines[-1].startswith(f"run {num_steps}/{num_steps}")


def test_steps_of_ten_seconds_always_have_a_line(monkeypatch):
    assert len(plain_lines(monkeypatch, [10.0] * 2_000, 2_000)) == 2_000


def test_zero_is_a_zero_and_no_item_is_broken_in_two():
    mismatch = "mismatch/abs_logprob_diff/mean"
    assert [headline({mismatch: value}) for value in (0.0, 0.0123)] == [["mismatch 0"], ["mismatch 1.23e-02"]]
    assert wrapped(["update 1.25", "warm-up 0.50", "evaluate 3.00"], 26) == "update 1.25  warm-up 0.50\nevaluate 3.00"
    assert wrapped(["grad norm 0.1"], 5).replace("\n", "") == "grad norm 0.1"


RUN = """
import logging, sys
from megatron_fp8rl.observe.display import make_display
display = make_display("live", "run", 300)
display.start()
display.message("checkpoint: /" + "/".join(["folder"] * 30))
for step in range(301):
    seconds = {"rollouts": 10.25, "pack": 0.05, "update": 12.5, "publish": 0.11, "checkpoint": 10.86, "evaluate": 20.5}
    metrics = {f"time/{name}/s": value for name, value in seconds.items()}
    metrics |= {"time/step/s": 54.27, "reward/score/mean": step / 300, "mismatch/abs_logprob_diff/mean": 0.0,
                "rollout/length/mean": 1024.5, "train/grad_norm/max": 0.125, "rollout/tokens_per_s/mean": 123456.0}
    if step % 10 == 0:
        metrics["eval/pass_rate/mean"] = step / 600
    display.show_step(step, metrics)
    if step == 100:
        display.warn("step 100: [engine 0] is slow, and " + "this line is longer than the terminal " * 4)
        logging.getLogger("megatron_fp8rl").warning("a replica is lost")
        print("printed by a reward function")
display.stop()
print("report: runs/run/report.html")
"""


@pytest.mark.parametrize("columns", [40, 80, 140])
def test_on_a_terminal_nothing_is_overwritten_broken_or_left_behind(columns):
    status, output = Terminal.run([sys.executable, "-c", RUN], columns, lines=40)
    shown = Terminal(columns).write(output)
    text = "".join(shown)  # lines that the terminal wrapped are whole again
    assert status == 0, text
    for message in (
        "checkpoint: /" + "/".join(["folder"] * 30),
        "warning: step 100: [engine 0] is slow, and " + ("this line is longer than the terminal " * 4).rstrip(),
        "a replica is lost",
        "printed by a reward function",
    ):
        assert text.count(message) == 1, shown
    [top], [bottom] = ([i for i, line in enumerate(shown) if line[0] == corner] for corner in "╭╰")
    panel = shown[top + 1 : bottom]
    assert all(len(line) == columns and line[0] == line[-1] == "│" for line in panel), shown
    assert shown[bottom + 1 :] == ["report: runs/run/report.html"]
    for label, value in (("reward", "1.000"), ("mismatch", "0"), ("pass rate", "0.500"), ("seconds", "54.27 s")):
        assert sum(re.fullmatch(rf"│ {label} .* {value} │", line) is not None for line in panel) == 1, shown
    for pair in ("rollouts 10.25", "checkpoint 10.86", "evaluate 20.50", "length 1024.5", "123456 tokens/s sampled"):
        assert columns == 40 or sum(pair in line for line in panel) == 1, (pair, shown)
    [curve] = [line for line in panel if line.startswith("│ reward")]
    drawn = len(re.sub(r"[^▁▂▃▄▅▆▇█]", "", curve))
    [clock] = [part for line in panel for part in re.findall(r"  \d[\w ]*, \d+s left │", line)]
    assert drawn == columns - len("│ step 300/300  " + clock), "curves have the width that there is"
    assert output.rindex(b"\x1b[?25h") > output.rindex(b"\x1b[?25l"), "the cursor is visible again"


def test_a_pipe_gets_plain_lines_without_control_characters():
    done = subprocess.run([sys.executable, "-c", RUN], capture_output=True, timeout=60)
    assert done.returncode == 0 and not re.search(rb"[\x00-\x09\x0b-\x1f\x7f]", done.stdout + done.stderr)
    lines = done.stdout.decode().splitlines()
    steps = [line for line in lines if line.startswith("run ")]
    assert steps[0].startswith("run 0/300  reward 0.000  eval pass rate 0.000  mismatch 0  length 1024.5")
    assert steps[-1].startswith("run 300/300  reward 1.000") and steps[-1].endswith("0s left")
    assert lines[-1] == "report: runs/run/report.html"
    assert [line[:9] for line in done.stderr.decode().splitlines()] == ["warning: ", "a replica"]


def test_a_terminal_that_cannot_move_its_cursor_gets_plain_lines():
    _, output = Terminal.run([sys.executable, "-c", RUN], 80, environment={"TERM": "dumb"})
    assert b"\x1b" not in output and b"run 300/300  reward 1.000" in output


def test_stderr_in_a_file_stays_there_while_the_panel_is_on_the_terminal(tmp_path):
    command = [sys.executable, "-c", RUN]
    _, output = Terminal.run(["sh", "-c", '"$@" 2> "$0"', str(tmp_path / "errors"), *command], 80)
    assert (tmp_path / "errors").read_text() == "a replica is lost\n" and b"a replica is lost" not in output


def test_the_live_panel_shows_step_reward_mismatch_and_phases():
    from rich.console import Console

    display = LiveDisplay("run", 10)
    display._console = Console(file=io.StringIO(), force_terminal=True, width=100)
    display._live.console = display._console
    display.start()
    display.show_step(1, METRICS)
    display.show_step(2, METRICS)
    display.warn("engine 0 [is] slow")
    display.stop()
    shown = display._console.file.getvalue()
    for text in ("step 2/10", "0.500", "1.23e-02", "update 1.25", "warning: engine 0 [is] slow", "left"):
        assert text in shown


@pytest.mark.parametrize(("seconds", "rows"), [(9.9, []), (75.0, ["│ now update 1m 15s │"])])
def test_the_panel_names_a_phase_that_takes_long(monkeypatch, seconds, rows):
    monkeypatch.setattr(display_module.spans, "current", lambda: ("update", seconds))
    from rich.console import Console

    console = Console(file=io.StringIO(), width=60)
    console.print(LiveDisplay("run", 10)._panel())
    shown = [" ".join(line.split()) for line in console.file.getvalue().splitlines()]
    assert [line for line in shown if line.startswith("│ now")] == rows
