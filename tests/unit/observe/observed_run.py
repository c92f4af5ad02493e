"""A small run for the observer's tests: made-up numbers, real groups."""

from dataclasses import replace

from megatron_fp8rl.algo.mismatch import MismatchReport, MismatchSlice
from megatron_fp8rl.config import RunConfig
from megatron_fp8rl.observe.observer import Observer
from megatron_fp8rl.types import Prompt, Rollout, RolloutGroup, single_turn
from tests.helpers.samples import make_completion


def make_config() -> RunConfig:
    from model_configs.tiny import tiny_qwen3

    cfg = replace(tiny_qwen3(), name="observed", num_steps=4)
    return replace(cfg, observe=replace(cfg.observe, display="none"))


def make_groups(step: int) -> tuple[RolloutGroup, ...]:
    prompt = Prompt(
        prompt_id=f"chain_sum/{step}",
        environment="chain_sum",
        token_ids=(1, 2),
        text=f"{step} + {step} = ",
        answer=str(2 * step),
    )

    def rollout(index: int, text: str, reward: float) -> Rollout:
        versions = {"min_version": step - 1, "max_version": step - 1}
        completion = make_completion(range(len(text) + 1), -0.5, text=text, **versions)
        return Rollout(
            prompt=prompt, index=index, branches=single_turn(prompt, completion), reward=reward, status="scored"
        )

    return (RolloutGroup(prompt=prompt, rollouts=(rollout(0, str(2 * step), 1.0), rollout(1, "1000", 0.0))),)


def make_report(level: float, step: int = 1, alarms: tuple[str, ...] = ()) -> MismatchReport:
    """A disagreement of ``level`` nats in the mean."""

    def part(label: str) -> MismatchSlice:
        return MismatchSlice(
            label=label,
            num_tokens=10,
            abs_logprob_diff_mean=level,
            abs_logprob_diff_max=5 * level,
            kl_k3_mean=level**2,
            ratio_min=1 - level,
            ratio_max=1 + level,
        )

    return MismatchReport(
        metrics={
            "mismatch/abs_logprob_diff/mean": level,
            "mismatch/abs_logprob_diff/max": 5 * level,
            "mismatch/kl_k3/mean": level**2,
            "mismatch/effective_sample_size/mean": 1 - level,
            "mismatch/fraction_corrected/mean": 0.0,
            "mismatch/fraction_vetoed/mean": 0.0,
            "mismatch/ratio/mean": 1.0,
            "mismatch/ratio/min": 1 - level,
            "mismatch/ratio/max": 1 + level,
        },
        by_position=tuple(map(part, ("0", "1", "2-3"))),
        by_environment=(part("chain_sum"),),
        by_turn=(part("1"),),
        worst=(part(f"chain_sum/{step}#0"),),
        alarms=alarms,
    )


def observe_run(run_dir, *, steps, cfg: RunConfig | None = None, mismatch=0.01, fail_at: int | None = None) -> None:
    """Observe some steps of a run, with an alarm in step 2."""
    with Observer(cfg or make_config(), True, run_dir) as observer:
        for step in steps:
            with observer.step(step) as log:
                log.groups(make_groups(step))
                log.mismatch(make_report(mismatch, step, ("the alarm of step 2",) if step == 2 else ()))
                if step == fail_at:
                    raise RuntimeError("layers.0.mlp.down_proj <differs>")
                log.update(
                    {
                        "train/loss/mean": 0.1 / step,
                        "train/grad_norm/max": 1.0,
                        "train/entropy/mean": 1.0 / step,
                        "eval/pass_rate/mean": step / 10,
                        "publish/total/s": 0.1,
                        "publish/pause/s": 0.05,
                    }
                )
