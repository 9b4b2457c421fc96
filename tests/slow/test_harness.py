"""How agents are killed here: the child, the world it calls, and how a parent ends."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

import harness
from desk import ROOT
from harness import Child, HarnessError, World, announced, child

SECONDS = 20.0  # for a child that is expected to do something
MANY = 500


class Ledger(World):
    """A world with one slow effect."""

    def __init__(self) -> None:
        super().__init__()
        self.sent, self.everything = list[int](), asyncio.Event()
        self.done = asyncio.Event()

    async def pay(self, amount: int) -> int:
        await asyncio.sleep(0.1)
        self.everything.set()
        await asyncio.sleep(0.1)
        self.sent.append(amount)
        return amount

    async def fail(self) -> None:
        raise ValueError("no such payment", 7)

    async def finish(self) -> None:
        self.done.set()


# --- What children do ----------------------------------------------------------------------------


async def pay_many(remote: Any) -> None:
    assert await asyncio.gather(*map(remote.pay, range(MANY))) == list(range(MANY))
    await remote.finish()


async def catch(remote: Any) -> None:
    try:
        await remote.fail()
    except ValueError as error:
        assert error.args == ("no such payment", 7)
        await remote.finish()


async def cut_off(remote: Any) -> None:
    """Send a whole message, and half of one."""
    whole = harness.message
    asyncio.ensure_future(remote.pay(1))
    await asyncio.sleep(0)
    harness.message = lambda content: whole(content)[:-1]
    await remote.pay(2)


async def raise_in_an_activity(remote: Any) -> None:
    async with announced(remote, "step"):
        raise RuntimeError("broken")


async def try_again(remote: Any) -> None:
    """What a retry on the same process does while its first attempt is held."""
    asyncio.ensure_future(remote.reach("before step"))
    await asyncio.sleep(0.1)
    await asyncio.gather(remote.pay(1), remote.reach("before step"))


async def talk(remote: Any) -> None:
    print("\x1b[31mlast words\x1b[0m\x07", flush=True)
    raise RuntimeError("why it died")


async def wait(remote: Any) -> None:
    await remote.finish()
    await asyncio.sleep(60)


# --- The child -----------------------------------------------------------------------------------


@pytest.fixture
def ledger() -> Ledger:
    return Ledger()


@pytest_asyncio.fixture
async def waiting(ledger: Ledger) -> AsyncIterator[Child]:
    """A child can be a fixture."""
    async with child("the child", "test_harness:wait", world=ledger) as started:
        await started.until(ledger.done, SECONDS, "its work")
        yield started


@pytest.mark.parametrize("job", ["pay_many", "catch"])
async def test_answers_and_errors_cross_as_themselves(ledger: Ledger, job: str) -> None:
    async with child("the child", f"test_harness:{job}", world=ledger) as started:
        await started.until(ledger.done, SECONDS, "its end")


async def test_what_has_arrived_is_carried_out_though_its_caller_was_killed(ledger: Ledger) -> None:
    async with child("the child", "test_harness:cut_off", world=ledger) as started:
        await started.until(ledger.everything, SECONDS, "its call")
        await started.kill()
        assert ledger.sent == []
    await asyncio.sleep(0.3)
    assert ledger.sent == [1] and len(ledger.calls) == 1 and ledger.error is None


async def test_the_point_after_is_announced_also_if_it_raised(ledger: Ledger) -> None:
    after = ledger.arm("after step")
    async with child("the child", "test_harness:raise_in_an_activity", world=ledger) as started:
        await started.until(after, SECONDS, "the point after")


async def test_every_attempt_of_a_held_process_is_held_until_it_is_dead(ledger: Ledger) -> None:
    held = ledger.arm("before step")
    async with child("the child", "test_harness:try_again", world=ledger) as started:
        await started.until(held, SECONDS, "its step")
        await asyncio.sleep(0.5)
        assert len(ledger.calls) == 3 and ledger.sent == []
        await started.kill()


async def test_a_child_that_fails_shows_its_last_lines_and_nothing_else_does(
    ledger: Ledger, capfd: pytest.CaptureFixture[str]
) -> None:
    async with child("the child", "test_harness:talk", world=ledger) as started:
        with pytest.raises(HarnessError, match="(?s)ended unexpectedly.*why it died") as failed:
            await started.until(ledger.done, SECONDS, "its work")
    assert str(failed.value).isprintable() or "\x1b" not in str(failed.value)
    assert capfd.readouterr() == ("", "")


async def test_a_child_that_is_late_is_named(ledger: Ledger, waiting: Child) -> None:
    with pytest.raises(HarnessError, match="the child did not come to the moon within 0 seconds"):
        await waiting.until(asyncio.Event(), 0.1, "the moon")


async def test_an_error_of_the_world_reaches_whoever_waits(ledger: Ledger, waiting: Child) -> None:
    async def lose() -> None:
        raise HarnessError("the world ended")

    ledger.begin(lose())
    with pytest.raises(HarnessError, match="the world ended"):
        await waiting.until(asyncio.Event(), SECONDS, "anything")


async def test_a_stopped_child_does_not_hang_the_parent(ledger: Ledger, waiting: Child) -> None:
    os.kill(waiting.pid, signal.SIGSTOP)
    assert waiting.process.stdin
    for _ in range(5):
        ledger.begin(waiting.process.stdin.send(b"x" * 1_000_000))
    await asyncio.wait_for(waiting.kill(), SECONDS)


# --- The parent ----------------------------------------------------------------------------------

PROGRAM = """
import asyncio, os, sys
import harness
from test_harness import Ledger

async def main():
    async with harness.dev_server() as server:
        await server.address()
        ledger = Ledger()
        async with harness.child("the child", "test_harness:wait", world=ledger) as child:
            await child.until(ledger.done, 20, "its work")
            print(child.pid, server.child.pid, flush=True)
            await asyncio.sleep(60)

harness.run(main())
"""


def group(pid: int) -> list[int]:
    """The processes of this process group."""
    found = subprocess.run(["ps", "-eo", "pid,pgid"], capture_output=True, text=True, check=True)
    rows = [line.split() for line in found.stdout.splitlines()[1:]]
    return [int(row[0]) for row in rows if int(row[1]) == pid]


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGINT, 130),
        (signal.SIGTERM, 143),
        (signal.SIGHUP, 129),
        (signal.SIGKILL, -9),
    ],
)
async def test_a_parent_takes_children_and_server_along(number: signal.Signals, code: int) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        PROGRAM,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
    )
    assert process.stdout and process.stderr
    pids = [int(word) for word in (await process.stdout.readline()).split()]
    assert [len(group(pid)) for pid in pids] == [1, 2]  # the child; the keeper and the server
    process.send_signal(number)
    assert await asyncio.wait_for(process.wait(), SECONDS) == code
    async with asyncio.timeout(SECONDS):
        while any(map(group, pids)):
            await asyncio.sleep(0.05)
    assert b"Traceback" not in await process.stderr.read()


@pytest.mark.parametrize(
    ("program", "code", "line"),
    [
        ("raise harness.HarnessError('what to do')", 1, "what to do\n"),
        ("raise BrokenPipeError", 141, ""),
        ("raise OSError(28, 'No space left on device')", 1, "[Errno 28] No space left on device\n"),
        ("return 7", 7, ""),
    ],
)
def test_a_program_ends_with_its_exit_code(program: str, code: int, line: str) -> None:
    text = f"import harness\nasync def main():\n    {program}\nharness.run(main())"
    ended = subprocess.run([sys.executable, "-c", text], cwd=ROOT, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (code, line)


def test_a_binary_that_is_not_there_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sysconfig.get_path", lambda name: "/nowhere")
    monkeypatch.setenv("PATH", "/nowhere")
    assert harness.temporal_binary() is None
