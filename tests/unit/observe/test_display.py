"""What the terminal shows."""

import io
import sys

import pytest

from megatron_fp8rl.observe import display as display_module
from megatron_fp8rl.observe.display import LiveDisplay, PlainDisplay, duration, make_display, phase_times, sparkline

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
    assert phase_times(METRICS) == "rollouts 0.50  update 1.25"


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
    clock, lines = [100.0], []
    monkeypatch.setattr(display_module, "monotonic", lambda: clock[0])
    monkeypatch.setattr("builtins.print", lambda line, **_: lines.append(line))
    display = PlainDisplay("run", num_steps)
    display.start()
    for step, step_s in enumerate(seconds, first):
        clock[0] += step_s
        display.show_step(step, {})
    return [line.split("  ")[-1] if line.endswith(" left") else "" for line in lines]


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
