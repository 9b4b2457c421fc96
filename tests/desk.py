"""What tests share: one Temporal dev server; for each test, a Task Queue and a world of its own.

The fixtures are at the end; `conftest.py` makes pytest see them.
"""

import asyncio
import os
import signal
import sys
import uuid
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from temporalio.client import Client, WorkflowFailureError
from temporalio.worker import UnsandboxedWorkflowRunner, Worker, WorkerConfig

import harness
import run_demo
from harness import DevServer, Remote
from refund_agent import (
    Answer,
    Case,
    Question,
    RefundActivities,
    RefundResult,
    build_worker,
    start_case,
)
from run_demo import DemoWorker, Durable, open_question
from run_demo import request_for as request_for


async def reply(question: Question) -> Answer:
    text = run_demo.SCRIPT.get(question.text, "Approved.")
    return Answer(question.id, text, approve=question.to == "reviewer")


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(run_demo.POLL_SECONDS)


async def question_of(case: Case) -> Question:
    """The question that is open; waits until one is."""
    while (question := await open_question(case)) is None:
        await asyncio.sleep(run_demo.POLL_SECONDS)
    return question


class Unsandboxed(DemoWorker):
    """Outside the sandbox a test can replace a function, or make days fractions of a second."""

    def configure_worker(self, config: WorkerConfig) -> WorkerConfig:
        config["workflow_runner"] = UnsandboxedWorkflowRunner()
        return super().configure_worker(config)


class Replaying(DemoWorker):
    """Every Workflow Task is a full replay, which checks determinism."""

    def configure_worker(self, config: WorkerConfig) -> WorkerConfig:
        config["max_cached_workflows"] = 0
        return super().configure_worker(config)


class Quiet(Durable):
    """A world of stand-ins that prints nothing, and people who answer."""

    replies: Callable[[Question], Awaitable[Answer]] = staticmethod(reply)

    def say(self, actor: str, text: str) -> None: ...

    def payment_intent(self, order_id: str) -> str:
        return self.shop.orders[order_id, 1].payment_intent

    @property
    def decisions(self) -> list[Any]:
        return [call.answer for call in self.calls if call.path == "decide"]

    def asked_of(self, person: str) -> int:
        return sum(question.to == person for question in self.asked)

    def remote(self) -> Remote:
        """How an agent in this process calls it."""

        async def call(*request: Any) -> Any:
            return await self.call(os.getpid(), *request)

        return Remote(call)

    async def reply(self, question: Question) -> Answer:
        return await self.replies(question)

    @asynccontextmanager
    async def attending(self, case: Case) -> AsyncIterator[None]:
        """People answer what this case asks, as long as the block runs. If they fail, it does."""

        async def attend() -> None:
            with suppress(WorkflowFailureError):  # for the test to see
                await self.attend(case)

        async with asyncio.TaskGroup() as tasks:
            people = tasks.create_task(attend())
            yield
            people.cancel()


class Desk:
    """An in-process Worker around a world of stand-ins, and people who answer."""

    def __init__(self, client: Client) -> None:
        self.client, self.queue = client, f"test-{uuid.uuid4()}"
        self.world = Quiet("1234")

    def worker(self, decider: Any = None) -> Worker:
        remote = self.world.remote()
        steps = RefundActivities(remote.stripe, remote.shop, (decider or remote).decide)
        return build_worker(self.client, self.queue, steps, remote.xmemory)

    async def start(self, order_id: str = "1234", case_id: str | None = None) -> Case:
        return await start_case(
            self.client,
            request_for(order_id),
            task_queue=self.queue,
            case_id=case_id or f"case-{uuid.uuid4()}",
        )

    @asynccontextmanager
    async def open(self, order_id: str = "1234", **worker: Any) -> AsyncIterator[Case]:
        """A started case, a Worker, and people who answer."""
        async with self.worker(**worker):
            case = await self.start(order_id)
            async with self.world.attending(case):
                yield case

    async def result_of(self, case: Case) -> RefundResult:
        """The result of a case whose people answer what is asked. A Worker runs elsewhere."""
        async with self.world.attending(case):
            return await case.result()

    async def run(self, order_id: str = "1234", **worker: Any) -> RefundResult:
        async with self.open(order_id, **worker) as case:
            return await case.result()


# --- Programs ------------------------------------------------------------------------------------

ROOT = Path(run_demo.__file__).parent
MARK = "REFUND_AGENT_TEST"  # in the environment of a program, and of all that it starts


@asynccontextmanager
async def program(*command: object, env: Mapping[str, str] = {}) -> AsyncIterator[Process]:
    """This Python with these arguments, in another working directory."""
    words, environment = [str(word) for word in command], {**os.environ, **env}
    process = await asyncio.create_subprocess_exec(
        sys.executable, *words, cwd="/", env=environment, stdin=PIPE, stdout=PIPE, stderr=PIPE
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def ended(
    *command: object, env: Mapping[str, str] = {}, typed: str = ""
) -> tuple[int | None, str, str]:
    """Its exit code, what it printed and its errors."""
    async with program(*command, env=env) as process:
        out, err = await process.communicate(typed.encode())
    return process.returncode, out.decode(), err.decode()


@pytest_asyncio.fixture
async def mark(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    """Fails the test if a process that it started is still alive some seconds after it."""
    monkeypatch.setenv(MARK, value := str(uuid.uuid4()))
    yield
    async with asyncio.timeout(5):
        await until(lambda: not alive(value))


def alive(mark: str) -> list[Path]:
    def marked(process: Path) -> bool:
        with suppress(OSError):
            return mark in (process / "environ").read_text(errors="replace")
        return False

    return list(filter(marked, Path("/proc").glob("[0-9]*")))


# --- Fixtures ------------------------------------------------------------------------------------


@pytest.fixture(scope="session", autouse=True)
def no_shell() -> Iterator[None]:
    """Nothing of the developer's shell reaches a test: no Temporal server, no proxy, and no SIGINT
    that is ignored because the tests run in the background."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            if name.startswith("TEMPORAL_") or name.lower().endswith("_proxy"):
                patch.delenv(name)
        patch.setenv("TEMPORAL_CONFIG_FILE", os.devnull)
        yield


@pytest_asyncio.fixture(scope="session")
async def server() -> AsyncIterator[DevServer]:
    async with harness.dev_server(*harness.FAST_TIMERS) as started:
        await started.client()  # it answers
        yield started


@pytest_asyncio.fixture(scope="session")
async def client(server: DevServer) -> Client:
    return await server.client(plugins=[DemoWorker("demo")])


@pytest.fixture
def desk(client: Client) -> Desk:
    return Desk(client)


@pytest.fixture
def world(desk: Desk) -> Quiet:
    return desk.world


@pytest_asyncio.fixture
async def open_desk(server: DevServer) -> Desk:
    """Its Workflows run outside the sandbox, so a test can change the agent."""
    return Desk(await server.client(plugins=[Unsandboxed("demo")]))


status = pytest.ExitCode.OK


def pytest_sessionfinish(exitstatus: pytest.ExitCode) -> None:
    global status
    status = exitstatus


@pytest.hookimpl(trylast=True)
def pytest_unconfigure() -> None:
    """The SDK's threads can crash a Python that is shutting down; see `harness.leave`."""
    if status != pytest.ExitCode.USAGE_ERROR:  # its message comes after this
        harness.leave(int(status))
