"""Agents that break something that all sessions of their worker use. The others must not notice."""

import asyncio
import concurrent.futures
import contextlib
import ctypes
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

from megatron_fp8rl.envs.agent_session import AgentError


class StrangeError(BaseException):
    def __str__(self):
        raise ValueError("no text")


class UnclearError(Exception):
    pass


def recurse(depth: int) -> int:
    return recurse(depth + 1) + 1


async def waits_for_ever(session):
    await asyncio.sleep(600)


async def leaves(session):
    sys.exit("from a task")


async def rollout(session, row):
    """Does what the row says after its first answer. Others ask twice, and use all that a worker shares."""
    kind = row.get("kind", "works")
    await session.ask()
    if kind in BAD:
        return await BAD[kind](session)
    await asyncio.sleep(0.3)
    await asyncio.to_thread(time.sleep, 0.1)
    session.say("+")
    await session.ask()
    assert os.getcwd() == row["folder"], os.getcwd()
    print("works", file=sys.stdout)
    return 1.0


async def sys_exit(session):
    sys.exit()


async def sys_exit_in_a_task(session):
    await asyncio.gather(leaves(session), waits_for_ever(session))


async def sys_exit_in_a_task_that_nobody_awaits(session):
    session.task = asyncio.create_task(leaves(session))
    await asyncio.sleep(600)


async def sys_exit_in_a_callback(session):
    asyncio.get_running_loop().call_later(0.01, sys.exit, "from a callback")
    await asyncio.sleep(600)


async def sys_exit_in_a_thread(session):
    await asyncio.to_thread(sys.exit, "from a thread")


async def interrupt(session):
    raise KeyboardInterrupt


async def recursion(session):
    recurse(0)


async def strange_error(session):
    raise StrangeError


async def surrogates(session):
    raise UnclearError("\ud800 a lone surrogate\nand a second line " + "x" * 5000)


async def generator_exit(session):
    raise GeneratorExit


async def cancels_itself(session):
    task = asyncio.ensure_future(asyncio.sleep(600))
    await asyncio.sleep(0)
    task.cancel()
    await task


async def stops_the_loop(session):
    asyncio.get_running_loop().stop()
    await asyncio.sleep(600)


async def closes_the_loop(session):
    asyncio.get_running_loop().close()


async def runs_a_loop(session):
    asyncio.run(session.ask())


async def shuts_threads_down(session):
    await asyncio.get_running_loop().shutdown_default_executor()


async def reads_input(session):
    input()


async def starts_a_program_that_reads_input(session):
    program = await asyncio.create_subprocess_exec("cat", stdout=asyncio.subprocess.PIPE)
    output, _ = await program.communicate()
    return float(output == b"")


async def asks_on_another_loop(session):
    def ask() -> None:
        asyncio.run(session.ask())

    await asyncio.to_thread(ask)


async def changes_the_folder(session):
    folder = Path(tempfile.mkdtemp()).resolve()
    os.chdir(folder)
    await asyncio.sleep(0.2)
    assert Path.cwd() == folder
    shutil.rmtree(folder)
    await asyncio.sleep(0.2)
    return 1.0


async def closes_output(session):
    sys.stdout.close()
    sys.stderr.close()
    return 1.0


async def forks(session):
    """A program that is started by fork, and copies of the worker that return into the agent."""
    import multiprocessing

    queue = multiprocessing.get_context("fork").SimpleQueue()
    process = multiprocessing.get_context("fork").Process(target=queue.put, args=("from a process",))
    process.start()
    assert await asyncio.to_thread(queue.get) == "from a process"
    await asyncio.to_thread(process.join)
    children = [os.fork()]
    if not children[0]:
        sys.exit(3)
    children.append(os.fork())
    if not children[1]:
        return 0.0
    children.append(os.fork())
    if not children[2]:
        await session.ask()
        return 0.0
    for child in children:
        await asyncio.to_thread(os.waitpid, child, 0)
    return 1.0


async def replaces_the_threads(session):
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        asyncio.get_running_loop().set_default_executor(threads)


async def an_infinite_reward(session):
    await session.reward(float("inf"))
    return 1.0


async def puts_its_key_into_the_environment(session):
    os.environ["MODE_OF_TEST"] = "shared by all"
    os.environ["OPENAI_API_KEY"] = session.api_key


async def a_set(session):
    return {1, 2}


async def a_generator(session):
    return (number for number in [1.0])


async def a_coroutine(session):
    return waits_for_ever(session)


async def not_json(session):
    session.messages.append({"role": "user", "content": {1, 2}})
    await session.ask()


async def no_number_of_tokens(session):
    await session.ask(max_tokens="9")


async def a_lone_surrogate(session):
    session.messages.append({"role": "user", "content": "\ud800"})
    await session.ask()


async def a_huge_message(session):
    session.messages.append({"role": "user", "content": "x" * (40 << 20)})
    await session.ask()


async def an_unknown_message(session):
    session.messages.append(5)
    await session.ask()


async def leaves_a_task(session):
    async def ask_for_ever() -> None:
        while True:
            with contextlib.suppress(AgentError):
                await session.ask()

    session.task = asyncio.create_task(ask_for_ever())
    return 1.0


async def a_task_raises(session):
    async def fail() -> None:
        raise UnclearError("nobody awaits this")

    session.task = asyncio.create_task(fail())
    await asyncio.sleep(0.1)
    return 1.0


async def os_exit(session):
    os._exit(0)


async def os_exit_in_a_task(session):
    async def leave() -> None:
        os._exit(3)

    session.task = asyncio.create_task(leave())
    await asyncio.sleep(600)


async def crash(session):
    ctypes.string_at(0)


async def crash_in_a_thread(session):
    await asyncio.to_thread(ctypes.string_at, 0)


async def crash_in_a_thread_of_its_own(session):
    threading.Thread(target=ctypes.string_at, args=(0,)).start()
    await asyncio.sleep(600)


async def kills_itself(session):
    os.kill(os.getpid(), signal.SIGKILL)


async def cancels_all_tasks(session):
    for task in asyncio.all_tasks():
        task.cancel()
    await asyncio.sleep(600)


BAD = {
    name.replace("_", " "): function for name, function in globals().items() if asyncio.iscoroutinefunction(function)
}
