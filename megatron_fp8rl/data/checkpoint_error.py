"""The error of an unusable checkpoint; it names the file or tensor."""

from collections.abc import Sequence

_MAX_SHOWN = 20


class CheckpointError(ValueError):
    """A checkpoint cannot be used. ``problems`` lists every problem, one sentence each."""

    def __init__(self, path: object, problems: Sequence[str] | str):
        self.path = path
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        shown = "\n".join(f"  {problem}" for problem in self.problems[:_MAX_SHOWN])
        rest = len(self.problems) - _MAX_SHOWN
        super().__init__(f"{path}:\n{shown}" + (f"\n  and {rest} more" if rest > 0 else ""))
