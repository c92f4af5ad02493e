"""A taskset of ``verifiers`` with several turns: products, with a calculator as the environment."""

from dataclasses import replace

import verifiers.v1 as vf

from megatron_fp8rl.envs.example_agents import Products
from megatron_fp8rl.envs.tools import calculate


class ProductData(vf.TaskData):
    answer: str = ""  # a whole session, as a demonstration
    result: str = ""


class ProductTask(vf.Task[ProductData]):
    @vf.reward(weight=1.0)
    async def right(self, trace) -> float:
        return float(trace.last_reply.strip() == self.data.result)


class ProductTasks(vf.Taskset[ProductTask]):
    def load(self):
        problems = map(Products().make_problem, range(4096))
        return [
            ProductTask(
                ProductData(prompt=problem.question, answer=problem.answer, result=problem.metadata["result"]),
                self.config.task,
            )
            for problem in problems
        ]


class CalculatorConfig(vf.EnvConfig):
    agent: vf.AgentConfig = vf.AgentConfig()


class Calculator(vf.Env[CalculatorConfig]):
    """The policy's first reply is calculated, its second is its answer."""

    async def run(self, task, agents):
        async with agents.agent.interaction(task) as policy:
            call = await policy.turn()
            if not call.terminated:
                await policy.turn(calculate(call.last_reply))


def tiny_products():
    """The run ``tiny_calculator`` on this taskset."""
    from model_configs.agents import tiny_calculator

    cfg, door = tiny_calculator(), "megatron_fp8rl.envs.libraries.verifiers"
    (source,) = cfg.data.environments
    source = replace(
        source,
        dataset=f"env:{door}:Tasks",
        options={"taskset": __file__},
        agent=f"{door}:rollout",
        agent_options={"taskset": __file__, "env": "verifiers_products"},
    )
    return replace(cfg, name="tiny_products", data=replace(cfg.data, environments=(source,)))


__all__ = ["Calculator", "ProductTasks"]
