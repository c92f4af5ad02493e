"""HTML of a session: who said what, what is trained, which policy version sampled it, and the rewards. Pure."""

from collections.abc import Iterator
from html import escape

from megatron_fp8rl.observe.groups import passes
from megatron_fp8rl.types import Completion, Context, Rollout, Trajectory

CSS = """
.talk { border-top: 1px solid var(--line); padding: 12px 0; } .talk:first-child { border-top: 0; }
.talk .head { display: flex; flex-wrap: wrap; gap: 6px 16px; align-items: baseline; margin-bottom: 8px; }
.talk .head b { font-size: 17px; } .talk .head span { color: var(--soft); font-size: 13px; }
.turn { display: grid; grid-template-columns: 110px 1fr 210px; gap: 14px; padding: 5px 10px; }
.turn { border-left: 4px solid #d5d9df; }
.turn.trained { border-left-color: var(--accent); background: #eef5fb; }
.turn .who { color: var(--soft); font-size: 13px; } .turn.trained .who { color: var(--accent); font-weight: 600; }
.turn .facts { color: var(--soft); font-size: 12.5px; text-align: right; }
@media (prefers-color-scheme: dark) { .turn.trained { background: #1b2a38; } .turn, .bar { border-color: #444a53; } }
.bar { display: inline-flex; width: 160px; height: 9px; border-radius: 4px; overflow: hidden; background: #e3e6ea; }
.bar i { display: block; height: 100%; }
"""
_COLORS = {"model": "#0072b2", "tools": "#e69f00", "queue": "#999999"}
_MAX_CHARACTERS = 2500  # of one segment


def conversation(rollout: Rollout) -> str:
    kind = {True: "good", False: "bad", None: ""}[passes(rollout)]
    facts = [f"{rollout.num_sampled_tokens} tokens sampled in {len(rollout.completions)} turns", rollout.status]
    facts += [f"{name} {value:.3g}" for name, value in rollout.reward_parts.items()]
    if rollout.detail:
        facts.append(rollout.detail)
    head = f'<b class="{kind}">{rollout.reward:.2f}</b><code>{escape(rollout.name)}</code>'
    head += "".join(f"<span>{escape(fact)}</span>" for fact in facts) + _seconds(rollout.seconds)
    rewards, order = iter(rollout.turn_rewards), iter(rollout.turn_order)
    branches = ""
    for number, branch in enumerate(rollout.branches):
        if len(rollout.branches) > 1:
            branches += f'<div class="who">branch {number + 1} of {len(rollout.branches)}</div>'
        branches += _branch(branch, rewards, order)
    return f'<div class="talk"><div class="head">{head}</div>{branches}</div>'


def is_session(rollout: Rollout) -> bool:
    """Whether the rollout is more than a prompt and a completion."""
    return bool(rollout.seconds) or len(rollout.completions) > 1 or len(rollout.branches) != 1


def _branch(branch: Trajectory, rewards: Iterator[float], order: Iterator[int]) -> str:
    rows, turn = "", 0
    for segment in branch.segments:
        if isinstance(segment, Completion):
            turn = next(order, turn) + 1
            rows += _turn(f"policy, turn {turn}", segment, _facts(segment, next(rewards, None)), "turn trained")
        else:
            rows += _turn(segment.role, segment, f"{len(segment.token_ids)} tokens, not trained", "turn")
    return rows


def _turn(who: str, segment: Context | Completion, facts: str, kind: str) -> str:
    text, half = segment.text, _MAX_CHARACTERS // 2
    if len(text) > _MAX_CHARACTERS:
        text = f"{text[:half]}\n… {len(text) - 2 * half} characters …\n{text[-half:]}"
    return (
        f'<div class="{kind}"><span class="who">{escape(who)}</span><code>{escape(text) or "&nbsp;"}</code>'
        f'<span class="facts">{escape(facts)}</span></div>'
    )


def _facts(completion: Completion, reward: float | None) -> str:
    num = len(completion.token_ids)
    versions = {completion.min_version, completion.max_version}
    facts = [f"{num} tokens, trained", "version " + " to ".join(map(str, sorted(versions)))]
    if num:
        facts.append(f"{-sum(completion.rollout_logprobs) / num:.2f} nats per token")
    if completion.num_cached_tokens:
        facts.append(f"{completion.num_cached_tokens} of {completion.num_prompt_tokens} prompt tokens cached")
    if completion.finish_reason != "stop":
        facts.append(completion.finish_reason)
    if reward is not None:
        facts.append(f"reward {reward:.3g}")
    return " · ".join(facts)


def _seconds(seconds: dict[str, float]) -> str:
    total = sum(seconds.values())
    if not total:
        return ""
    bars = "".join(
        f'<i style="width:{100 * value / total:.1f}%;background:{_COLORS.get(name, "#56b4e9")}"></i>'
        for name, value in seconds.items()
    )
    text = ", ".join(f"{name} {value:.2g} s" for name, value in seconds.items())
    return f'<span class="bar">{bars}</span><span>{escape(text)}</span>'
