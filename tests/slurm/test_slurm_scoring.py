"""A score server on a node of a real Slurm, asked from another node: who scores, and what the server's death costs."""

from __future__ import annotations

from pathlib import Path

from slurm_cluster import SlurmCluster, logs_of

from launch.plan import Request, absolute_run_dir, score_roles
from launch.spec import JobSpec, Role, endpoint_file, log_file
from megatron_fp8rl import cli
from tests.helpers.slurm_jobs import ci_cluster, nodes_of, program, submit

# A scorer that takes its server with it, once.
JUDGE = """
    import contextlib, os, signal
    from megatron_fp8rl.config import DataConfig, EnvironmentConfig, RunConfig

    class Judge:
        def score(self, prompt, text):
            with contextlib.suppress(FileExistsError):
                if text == "kill":
                    open(prompt.metadata["mark"], "x").close()
                    os.kill(os.getppid(), signal.SIGKILL)
            return float(text == prompt.answer)

    def run() -> RunConfig:
        from dataclasses import replace
        from megatron_fp8rl.cli import load_config
        judge = EnvironmentConfig(dataset="judge:Judge")
        data = DataConfig(environments=(judge,), num_score_workers=2, score_servers=1)
        return replace(load_config("tiny_qwen3_moe"), data=data)
"""
ASK = """
    import os, sys
    from megatron_fp8rl import cli
    from megatron_fp8rl.envs.remote_scoring import build_scorer
    from megatron_fp8rl.types import Prompt
    cfg = cli.parse_overrides(cli.load_config("judge:run"), sys.argv[1:])
    prompt = Prompt(prompt_id="p", environment="judge:Judge", token_ids=(1,), text="?", answer="right",
                    metadata={"mark": os.path.join(cfg.run_dir, "mark")})
    with build_scorer(cfg) as pool:
        for texts in (["right", "wrong"] * 8, ["kill", "right"] * 4):
            futures = [pool.submit(prompt, text) for text in texts]
            rewards = [future.result()[:2] for future in futures]
            print("SCORES", rewards, "ASKED FROM", os.uname().nodename, flush=True)
"""


def test_completions_are_scored_on_another_node_which_may_lose_its_server(
    slurm: SlurmCluster, folder: Path, monkeypatch
):
    program(folder, "judge", JUDGE)
    monkeypatch.syspath_prepend(str(folder))
    words = ("--output_dir", str(folder))
    cfg = cli.parse_overrides(cli.load_config("judge:run"), words)
    cluster = ci_cluster(run_root=str(folder))
    request = Request(job="rl", cluster=cluster, config_name="judge:run", cfg=cfg)
    task = Role(name="task", kind="command", nodes=(0,), command=(program(folder, "ask", ASK), *words))
    roles = (task, *score_roles(request, (1,), absolute_run_dir(cfg, cluster)))
    job = submit(
        JobSpec(name="scores", run_dir=str(folder), nodes=2, roles=roles, env={"PYTHONPATH": str(folder)}), cluster
    )
    assert slurm.wait(job) == "COMPLETED", logs_of(folder)
    first, second = nodes_of(slurm, job)
    log = log_file(folder, "task", 0).read_text()
    right, wrong = (1.0, "scored"), (0.0, "scored")
    assert f"SCORES {[right, wrong] * 8} ASKED FROM {first}\n" in log
    assert f"SCORES {[wrong, right] * 4} ASKED FROM {first}\n" in log
    served = log_file(folder, "score-0", 1).read_text()
    assert [f"incarnation {number}, node 1 ({second})" in served for number in range(3)] == [True, True, False]
    assert not endpoint_file(folder, "score-0", "scorer").exists(), "the job has ended"
