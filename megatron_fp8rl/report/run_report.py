"""Writes ``report.html``, a self-contained page with all plots and tables, and the overview ``report.png``."""

from collections.abc import Iterable, Sequence
from html import escape
from itertools import starmap
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from megatron_fp8rl.envs.rewards.extraction import find_answer
from megatron_fp8rl.observe.display import duration, interval_text
from megatron_fp8rl.observe.groups import passes
from megatron_fp8rl.observe.metrics import meaning
from megatron_fp8rl.observe.records import write_text
from megatron_fp8rl.report.conversations import CSS as CONVERSATION_CSS
from megatron_fp8rl.report.conversations import conversation, is_session
from megatron_fp8rl.report.figures import (
    AGREEMENT,
    SECTIONS,
    draw_pass_at_k,
    make_figure,
    overview,
    sentence_for_zeros,
)
from megatron_fp8rl.report.run_data import RunData
from megatron_fp8rl.report.style import save_png, styled, svg_uri
from megatron_fp8rl.types import Rollout, RolloutGroup

_CSS = """
:root { --ink: #22262c; --soft: #6b717b; --line: #e3e6ea; --paper: #ffffff; --wash: #f6f7f9; --accent: #0072b2; }
* { box-sizing: border-box; }
body { margin: 0; color: var(--ink); background: var(--wash); font: 15px/1.5 system-ui, "Segoe UI", sans-serif; }
main { max-width: 1280px; margin: 0 auto; padding: 32px 24px 64px; }
h1 { font-size: 26px; margin: 0 0 4px; } h2 { font-size: 18px; margin: 40px 0 12px; }
.lead { color: var(--soft); margin: 0 0 24px; }
.tiles { display: grid; grid-template-columns: repeat(auto-fill, minmax(190px, 1fr)); gap: 12px; }
.tile, figure, .card { background: var(--paper); border: 1px solid var(--line); border-radius: 10px; }
.tile { padding: 14px 16px; } .tile b { display: block; font-size: 22px; font-weight: 650; white-space: nowrap; }
.tile span { color: var(--soft); font-size: 13px; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(520px, 100%), 1fr)); gap: 16px; }
figure { margin: 0; padding: 12px; } figure img { width: 100%; display: block; }
.card { padding: 4px 16px; overflow-x: auto; margin-bottom: 12px; }
table { border-collapse: collapse; width: 100%; font-size: 13.5px; }
th { text-align: left; color: var(--soft); font-weight: 600; }
th, td { padding: 7px 14px 7px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
tr:last-child td { border-bottom: 0; } td.n { font-variant-numeric: tabular-nums; white-space: nowrap; }
code, pre { font: 12.5px/1.5 ui-monospace, "SF Mono", Menlo, monospace; white-space: pre-wrap; word-break: break-word; }
.good { color: #00795a; } .bad { color: #b34700; }
.failed { border: 1px solid #e3b0a0; border-left: 6px solid #d55e00; border-radius: 10px; }
.failed { background: #fff6f2; padding: 14px 18px; }
.failed h2 { margin: 0 0 6px; color: #a03d00; } details summary { cursor: pointer; padding: 8px 0; }
footer { color: var(--soft); margin-top: 40px; font-size: 13px; }
@media (max-width: 560px) {
  main { padding: 20px 12px 40px; } .tiles { grid-template-columns: 1fr 1fr; gap: 8px; }
  .tile { padding: 10px 12px; } .tile b { font-size: 17px; }
  figure { overflow-x: auto; padding: 8px; } figure img { width: 520px; }
}
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e8ec; --soft: #9aa1ac; --line: #33383f; --paper: #1c1f24; --wash: #14161a; --accent: #56b4e9; }
  figure { background: #ffffff; border-color: #d8d8d8; filter: invert(0.88) hue-rotate(180deg) brightness(1.25); }
  .good { color: #3ec9a3; } .bad { color: #ff9a5c; }
  .failed { background: #33211a; border-color: #6b4030; border-left-color: #d55e00; } .failed h2 { color: #ff9a5c; }
}
"""
# Tiles of runs with a mismatch: (metric, format, label).
_OF_INEXACT = (
    ("mismatch/kl_k3/mean", "{:.1e}", "mean KL (k3) of trainer and engine"),
    ("mismatch/effective_sample_size/mean", "{:.1%}", "effective sample size"),
)
_NUM_SAMPLES = 20  # highest and lowest rewarded completions of the first and the last step
_NUM_SESSIONS = 3  # of sessions, which are shown with all turns


def write_report(run_dir: Path | str) -> Path:
    """Write ``report.html`` and ``report.png`` to a run's folder; return the path of the page. Raises FileNotFoundError
    if the folder contains no run."""
    run = RunData(Path(run_dir))
    if not run.records and not run.config and not run.evaluations:
        raise FileNotFoundError(f"{run_dir} has neither metrics.jsonl nor config.json nor evaluations")
    with styled():
        page = render(run)
        if run.records:
            save_png(overview(run), run.run_dir / "report.png")
    path = run.run_dir / "report.html"
    write_text(path, page)
    return path


def render(run: RunData) -> str:
    name = escape(str(run.config.get("name", run.run_dir.name)))
    parts = [f"<h1>{name}</h1>", f'<p class="lead">{_lead(run)}</p>', _failure(run), _tiles(run)]
    for title, draws in SECTIONS.items():
        zeros = {draw: sentence for draw in draws if (sentence := sentence_for_zeros(draw, run))}
        figures = (make_figure(draw, run) for draw in draws if draw not in zeros)
        images = "".join(_image(figure) for figure in figures if figure is not None)
        note = (_agreement(run) if title == AGREEMENT else "") + (f"<p>{' '.join(zeros.values())}</p>" if zeros else "")
        if images or note:
            plots = f'<div class="plots">{images}</div>' if images else ""
            parts.append(f"<h2>{escape(title)}</h2>{note}{plots}")
    sections = (_evaluations, _worst_sequences, _warnings, _samples, _last_metrics, _configuration, _versions)
    body = "\n".join(filter(None, [*parts, *(section(run) for section in sections)]))
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{name}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{_CSS}{CONVERSATION_CSS}</style></head>\n"
        f"<body><main>{body}<footer>Written by megatron_fp8rl.</footer></main></body></html>\n"
    )


def _agreement(run: RunData) -> str:
    if not run.is_exact:
        return ""
    steps = len(run.values("mismatch/abs_logprob_diff/max"))
    return f"<p>Trainer and engine computed equal log-probabilities for every token of all {steps} measured steps.</p>"


def _image(figure: Figure) -> str:
    title = escape(figure.axes[0].get_title(loc="left"))
    return f'<figure><img alt="{title}" src="{svg_uri(figure)}"></figure>'


def _lead(run: RunData) -> str:
    if not run.records and not run.config:
        return "Evaluations of checkpoints"
    model, precision = run.config.get("model", {}), run.config.get("precision", {})
    status = "failed" if run.failure else "finished" if run.is_done else "still running when this page was written"
    facts = [status]
    if model:
        experts = f", {model['num_experts']} experts" if model.get("num_experts") else ""
        facts.append(f"{model['family']}, {model['num_layers']} layers of {model['hidden_size']}{experts}")
        facts.append(f"training in {precision['trainer']}, rollouts in {precision['rollout']}")
    return escape(" · ".join([*facts, f"seed {run.config.get('seed', '?')}"]))


def _failure(run: RunData) -> str:
    failure = run.failure
    if not failure:
        return ""
    where = f" in step {failure['step']}" if failure.get("step") is not None else " before the first step"
    partial = failure.get("metrics_of_the_unfinished_step") or {}
    rows = _table(("metric of the unfinished step", "value"), partial.items())
    last_lines = "\n".join(failure["traceback"].splitlines()[-30:])
    return (
        f'<section class="failed"><h2>The run failed{escape(where)}: {escape(failure["error"])}</h2>'
        f"<p><code>{escape(failure['message'])}</code></p>"
        f"<details><summary>last lines of the traceback</summary><pre>{escape(last_lines)}</pre></details>"
        + (f"<details><summary>metrics of the unfinished step</summary>{rows}</details>" if partial else "")
        + "</section><br>"
    )


def _tiles(run: RunData) -> str:
    tiles: list[tuple[str, str]] = []
    evals = run.values("eval/pass_rate/mean")
    if len(evals) > 1:
        tiles.append((f"{evals[0]:.0%} → {evals[-1]:.0%}", "held-out pass rate, start → end"))
    elif evals:
        tiles.append((f"{evals[0]:.0%}", "held-out pass rate"))
    elif held_out := run.values("eval/score/mean"):
        tiles.append(
            (" → ".join(f"{value:.2f}" for value in dict.fromkeys((held_out[0], held_out[-1]))), "held-out reward")
        )
    rewards = run.values("reward/score/mean")
    if rewards:
        tail = rewards[-5:]
        tiles.append((f"{rewards[0]:.2f} → {sum(tail) / len(tail):.2f}", "reward, first step → mean of the last 5"))
    for key, form, label in (
        ("mismatch/abs_logprob_diff/mean", "{:.1e}", "mean |old − rollout|, nats"),
        *(() if run.is_exact else _OF_INEXACT),
        ("rollout/tokens_per_s/mean", "{:,.0f}", "tokens/s sampled"),
        ("train/tokens_per_s/mean", "{:,.0f}", "tokens/s trained"),
        ("publish/total/s", "{:.2f} s", "to publish the weights"),
    ):
        if (value := run.mean(key)) is not None:
            tiles.append((form.format(value) if value else "0", label))
    seconds = [s for step, s in zip(*run.series("time/step/s"), strict=True) if step > 0]
    if seconds:
        tiles.append((f"{sorted(seconds)[len(seconds) // 2]:.2f} s", f"per step (median of {len(seconds)})"))
        tiles.append((duration(sum(run.values("time/step/s"))), "in all steps"))
    inner = "".join(f'<div class="tile"><b>{escape(v)}</b><span>{escape(label)}</span></div>' for v, label in tiles)
    return f'<div class="tiles">{inner}</div>' if tiles else ""


def _evaluations(run: RunData) -> str:
    if not run.evaluations:
        return ""
    figure = make_figure(draw_pass_at_k, run)  # None if the reward does not say what is right
    ks = sorted({int(k) for result in run.evaluations for k in result["overall"]["pass_at"]})
    header = ("checkpoint", "environment", "problems", "completions", "accuracy", *(f"pass@{k}" for k in ks), "reward")
    rows = []
    for result in run.evaluations:
        parts = dict(result["environments"]) | ({"all": result["overall"]} if len(result["environments"]) > 1 else {})
        for name, part in parts.items():
            estimates = [part["accuracy"], *(part["pass_at"].get(str(k)) for k in ks)]
            texts = ["–" if estimate is None else interval_text(estimate) for estimate in estimates]
            texts.append(f"{part['mean_reward']:.3f}")
            rows.append((result["name"], name, part["num_problems"], part["num_completions"], *texts))
    note = "<p>Brackets show 95 % intervals: Wilson score for accuracy, bootstrap over problems for pass@k.</p>"
    card = f'<div class="card">{_table(header, rows)}{note}</div>'
    plot = f'<div class="plots">{_image(figure)}</div><br>' if figure else ""
    return f"<h2>Evaluations of checkpoints</h2>{plot}{card}"


def _worst_sequences(run: RunData) -> str:
    """The run's sequences with the largest mismatch between trainer and engine."""
    parts = [(record["step"], part) for record in run.details for part in record.get("worst", ())]
    parts.sort(key=lambda item: -item[1]["abs_logprob_diff_mean"])
    rows = [
        (
            step,
            part["label"],
            part["num_tokens"],
            part["abs_logprob_diff_mean"],
            part["abs_logprob_diff_max"],
            f"{part['ratio_min']:.3f} to {part['ratio_max']:.3f}",
        )
        for step, part in parts[:8]
        if not run.is_exact
    ]
    header = ("step", "rollout", "tokens", "mean |old − rollout|", "max", "importance weights")
    return f'<h2>Largest disagreement</h2><div class="card">{_table(header, rows)}</div>' if rows else ""


def _warnings(run: RunData) -> str:
    rows = [(record["step"], text) for record in run.details for text in record.get("warnings", ())]
    if not rows:
        return ""
    table = _table(("step", "warning"), rows[:50])
    more = f"<p>and {len(rows) - 50} more in details.jsonl</p>" if len(rows) > 50 else ""
    return f'<h2>Warnings</h2><div class="card">{table}{more}</div>'


def _samples(run: RunData) -> str:
    """The highest and lowest rewarded completions of the first and the last recorded step. The extracted answer is the
    text that built-in rewards read, where it is not the whole completion."""
    return "\n".join(starmap(_samples_of, run.first_and_last_groups()))


def _samples_of(step: int, groups: Sequence[RolloutGroup]) -> str:
    rollouts = sorted((r for g in groups for r in g.rollouts), key=lambda r: (-r.reward, r.name))
    limit = _NUM_SESSIONS if any(map(is_session, rollouts)) else _NUM_SAMPLES
    shown = _distinct(rollouts, limit)
    worst = [r for r in _distinct(rollouts[::-1], limit) if all(r is not other for other in shown)]
    shown += worst[::-1]
    if any(map(is_session, shown)):
        return f'<h2>Sessions of step {step}</h2><div class="card">{"".join(map(conversation, shown))}</div>'
    rows = "".join(map(_sample_row, shown))
    head = "".join(
        f"<th>{h}</th>" for h in ("reward", "prompt", "completion", "extracted answer", "reference", "tokens", "status")
    )
    return f'<h2>Completions of step {step}</h2><div class="card"><table><tr>{head}</tr>{rows}</table></div>'


def _distinct(rollouts: Iterable[Rollout], limit: int) -> list[Rollout]:
    """The first rollouts, at most one per prompt."""
    chosen: dict[str, Rollout] = {}
    for rollout in rollouts:
        if len(chosen) < limit:
            chosen.setdefault(rollout.prompt.prompt_id, rollout)
    return list(chosen.values())


def _sample_row(rollout: Rollout) -> str:
    kind = {True: "good", False: "bad", None: ""}[passes(rollout)]
    parts = "".join(f" {name} {value:.2g}" for name, value in rollout.reward_parts.items())
    status = rollout.status + (f": {rollout.detail}" if rollout.detail else "") + parts
    completion = "".join(branch.text for branch in rollout.branches[-1:])
    answer = find_answer(completion).text
    cells = (rollout.prompt.text, completion, "" if answer == completion.strip() else answer, rollout.prompt.answer)
    return (
        f'<tr><td class="n {kind}">{rollout.reward:.2f}</td>'
        + "".join(f"<td><code>{escape(text[:1500]) or '&nbsp;'}</code></td>" for text in cells)
        + f'<td class="n">{rollout.num_sampled_tokens}</td><td>{escape(status)}</td></tr>'
    )


def _last_metrics(run: RunData) -> str:
    if not run.records:
        return ""
    keys = sorted({key for record in run.records for key in record} - {"step"})
    rows = [
        (key, _number(run.first(key)), _number(run.mean(key)), _number(run.last(key)), meaning(key) or "")
        for key in keys
    ]
    table = _table(("metric", "first", "mean", "last", "meaning"), rows)
    return f'<h2>All metrics</h2><div class="card"><details><summary>{len(rows)} keys</summary>{table}</details></div>'


def _configuration(run: RunData) -> str:
    if not run.config:
        return ""
    nested = {key: value for key, value in run.config.items() if isinstance(value, dict)}
    sections = {"run": {key: value for key, value in run.config.items() if key not in nested}, **nested}
    blocks = "".join(
        f"<details><summary><b>{escape(name)}</b></summary>{_table(('field', 'value'), fields.items())}</details>"
        for name, fields in sections.items()
    )
    return f'<h2>Configuration</h2><div class="card">{blocks}</div>'


def _versions(run: RunData) -> str:
    versions: dict[str, Any] = dict(run.versions)
    if not versions:
        return ""
    packages = versions.pop("packages", {})
    commit = (versions.pop("megatron_fp8rl", None) or {}).get("commit")
    versions.pop("started_unix_s", None)
    rows = [("megatron_fp8rl commit", commit or "not a repository"), *packages.items()]
    rows += [(key, ", ".join(value) if isinstance(value, list) else value) for key, value in versions.items() if value]
    return f'<h2>Versions</h2><div class="card">{_table(("what", "version"), rows)}</div>'


def _table(header: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    head = "".join(f"<th>{escape(text)}</th>" for text in header)
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"


def _cell(value: Any) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return f'<td class="n">{_number(value)}</td>'
    return f"<td>{escape(str(value))}</td>"


def _number(value: float | None) -> str:
    return "–" if value is None else str(value) if isinstance(value, int) else f"{value:.4g}"
