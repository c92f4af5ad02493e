"""A taskset of the library ``verifiers``: one question, one answer."""

import verifiers.v1 as vf


class SumData(vf.TaskData):
    answer: str = ""


class SumTask(vf.Task[SumData]):
    @vf.reward(weight=1.0)
    async def right(self, trace) -> float:
        return float(trace.last_reply.strip() == self.data.answer)


class Sums(vf.Taskset[SumTask]):
    def load(self):
        return [
            SumTask(SumData(prompt=f"{a}+{b}=", answer=str(a + b)), self.config.task)
            for a in range(9)
            for b in range(9)
        ]


__all__ = ["Sums"]
