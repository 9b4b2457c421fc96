"""One Temporal dev server for the suite; a fresh world and a fresh Task Queue for every test."""

import asyncio
import os
import signal
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest
import pytest_asyncio
from temporalio.client import Client
from temporalio.worker import UnsandboxedWorkflowRunner, Worker, WorkerConfig

import harness
import run_demo
from harness import HarnessPlugin, Server, World, background, open_question
from refund_agent import (
    Answer,
    Case,
    Question,
    RefundActivities,
    RefundAgent,
    RefundRequest,
    RefundResult,
    build_worker,
    start_case,
)


def request_for(order_id: str) -> RefundRequest:
    return run_demo.Options(order_id, "before-refund", typed=False, ui=False).request


async def reply(question: Question) -> Answer:
    text = run_demo.SCRIPT.get(question.text, "Approved.")
    return Answer(question.id, text, approve=question.to == "reviewer")


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(harness.POLL_SECONDS)


async def question_of(case: Case) -> Question:
    """The question that is open; waits until one is."""
    while (question := await open_question(case)) is None:
        await asyncio.sleep(harness.POLL_SECONDS)
    return question


class Unsandboxed(HarnessPlugin):
    """Outside the sandbox a test can replace a function, or make days fractions of a second."""

    def configure_worker(self, config: WorkerConfig) -> WorkerConfig:
        config["workflow_runner"] = UnsandboxedWorkflowRunner()
        return super().configure_worker(config)


class Desk:
    """An in-process Worker around a world of stand-ins, and people who answer."""

    def __init__(self, client: Client) -> None:
        self.client, self.queue = client, f"test-{uuid.uuid4()}"
        self.world = World(list(run_demo.ORDERS.values()), reply, lambda call: None)

    def worker(self, decider: Any = None) -> Worker:
        world = self.world
        steps = RefundActivities(
            stripe=world.stripe, shop=world.shop, decide=(decider or world.decider).decide
        )
        return build_worker(self.client, self.queue, steps, world.xmemory)

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
            async with background(partial(self.world.people.converse, case)):
                yield case

    async def result_of(self, case: Case) -> RefundResult:
        """The result of a case whose people answer what is asked. A Worker runs elsewhere."""
        async with background(partial(self.world.people.converse, case)):
            return await case.result()

    async def reset(self, case: Case, to: str = "FirstWorkflowTask", run_id: str = "") -> Case:
        """What an operator types. `to` is the first Workflow Task, the last one, or the one that
        scheduled this Activity. The handle is of the new run."""
        binary, address = harness.temporal_binary(), self.client.service_client.config.target_host
        where = ["--type", to]
        async for event in case.fetch_history_events():
            facts = event.activity_task_scheduled_event_attributes
            if facts.activity_type.name == to:
                where = ["--event-id", str(facts.workflow_task_completed_event_id)]
        where += ["--run-id", run_id] if run_id else []
        command = (
            f"workflow reset --address {address} --workflow-id {case.id} --reason test".split()
        )
        process = await asyncio.create_subprocess_exec(
            str(binary), *command, *where, stdout=asyncio.subprocess.DEVNULL
        )
        assert await process.wait() == 0
        return self.client.get_workflow_handle_for(RefundAgent.run, case.id)

    async def run(self, order_id: str = "1234", **worker: Any) -> RefundResult:
        async with self.open(order_id, **worker) as case:
            return await case.result()


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
async def server() -> AsyncIterator[Server]:
    async with harness.dev_server() as started:
        await started.client()  # it answers
        yield started


@pytest_asyncio.fixture(scope="session")
async def client(server: Server) -> Client:
    return await harness.connect(server.address, plugins=[HarnessPlugin("demo")])


@pytest.fixture
def desk(client: Client) -> Desk:
    return Desk(client)


@pytest_asyncio.fixture
async def open_desk(server: Server) -> Desk:
    """Its Workflows run outside the sandbox, so a test can change the agent."""
    return Desk(await harness.connect(server.address, plugins=[Unsandboxed("demo")]))


status = pytest.ExitCode.OK


def pytest_sessionfinish(exitstatus: pytest.ExitCode) -> None:
    global status
    status = exitstatus


@pytest.hookimpl(trylast=True)
def pytest_unconfigure() -> None:
    """The SDK's threads can crash a Python that is shutting down; see `harness.leave`."""
    if status != pytest.ExitCode.USAGE_ERROR:  # its message comes after this
        harness.leave(int(status))
