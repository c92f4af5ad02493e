"""A taskset of ``verifiers`` with a stateful tool: the policy brings a counter to a number."""

import verifiers.v1 as vf


class Count(vf.State):
    value: int = 0


class Counter(vf.Toolset[vf.ToolsetConfig, Count]):
    @vf.tool
    async def add(self, number: int) -> str:
        """Add a number to the counter."""
        self.state.value += number
        return f"the counter shows {self.state.value}"


class CounterTask(vf.Task[vf.TaskData, Count]):
    @classmethod
    def toolsets(cls, config):
        return [Counter(vf.ToolsetConfig())]

    @vf.reward(weight=1.0)
    async def reached(self, trace) -> float:
        return float(trace.state.value == 5)


class Counters(vf.Taskset[CounterTask]):
    def load(self):
        return [CounterTask(vf.TaskData(prompt=f"Bring the counter to 5 ({i})."), self.config.task) for i in range(16)]


__all__ = ["Counters"]

if __name__ == "__main__":  # as that library starts a tool's server
    Counter.run()
