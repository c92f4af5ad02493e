"""An environment whose scorer does whatever the completion says. Imported by score workers."""

import os
import re
import signal
import subprocess
import sys
import time

from megatron_fp8rl.envs.environment import Problem


class Judge:
    def __init__(self, bonus: float = 0.0):
        self.bonus = bonus
        self.kept = []

    def make_problem(self, index: int) -> Problem:
        return Problem(question=f"question {index}", answer=str(index))

    def score(self, prompt, completion_text: str) -> float:
        command, _, argument = completion_text.partition(":")
        if command == "sleep":
            time.sleep(float(argument))
        elif command == "regex":
            re.match(r"(a+)+$", "a" * 60 + "b")  # exponential, and holds the interpreter lock
        elif command == "crash":
            os.abort()
        elif command in ("kill", "stop"):
            with open(argument, "a+") as file:  # a line for each time that it was asked
                file.write("asked\n")
                file.seek(0)
                if len(file.readlines()) == 1 or "always" in argument:
                    file.flush()
                    os.kill(os.getpid(), signal.SIGKILL if command == "kill" else signal.SIGSTOP)
        elif command == "exit":
            print("last words", file=sys.stderr, flush=True)
            os._exit(7)
        elif command == "raise":
            raise RuntimeError(argument)
        elif command == "nan":
            return float("nan")
        elif command == "print":
            print('{"reward": 99}')  # must not be taken for a reply
        elif command == "child":
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            with open(argument, "w") as file:
                file.write(str(child.pid))
            time.sleep(600)
        elif command == "session":
            args = [sys.executable, "-c", "import time; time.sleep(600)"]
            child = subprocess.Popen(args, start_new_session=True)
            with open(argument, "w") as file:
                file.write(str(child.pid))
            time.sleep(600)
        elif command == "fork":
            if os.fork() == 0:
                time.sleep(0.3)
                return 5.0  # after the parent has answered
        elif command == "allocate":
            bytearray(int(float(argument) * 2**30))
        elif command == "leak":
            self.kept.append(bytearray(int(float(argument) * 2**30)))
        elif command == "leak quietly":  # as a scorer that catches every error
            try:
                self.kept.append(bytearray(int(float(argument) * 2**30)))
            except MemoryError:
                return -1.0
        elif command == "leak files":
            self.kept += [os.open(os.devnull, os.O_RDONLY) for _ in range(int(argument))]
        elif command == "chatter":
            for _ in range(int(argument)):
                print("x" * (1 << 20))
            return float(os.fstat(2).st_size)
        elif command == "variable":
            return float(argument in os.environ)
        elif command == "huge":
            return 1e308
        elif command == "pid":
            return float(os.getpid())
        return float(completion_text == prompt.answer) + self.bonus


class Broken:
    def __init__(self):
        raise OSError("no licence server")


class Fragile(Judge):
    """Fails for every third problem."""

    def make_problem(self, index: int) -> Problem:
        if index % 3 == 0:
            raise KeyError(index)
        return super().make_problem(index)
