"""One Temporal dev server for the suite; a fresh world and a fresh Task Queue for every test."""

import os
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial

import pytest
import pytest_asyncio
from temporalio.client import Client
from temporalio.worker import UnsandboxedWorkflowRunner, Worker, WorkerConfig

import harness
import run_demo
from harness import HarnessPlugin, Server, World, background
from refund_agent import (
    Answer,
    Case,
    Decider,
    Question,
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

    def worker(self, decider: Decider | None = None) -> Worker:
        world = self.world
        return build_worker(
            self.client, self.queue, stripe=world.stripe, shop=world.shop,
            decider=decider or world.decider, memory=world.xmemory)

    async def start(self, order_id: str = "1234", case_id: str | None = None) -> Case:
        return await start_case(
            self.client, request_for(order_id), task_queue=self.queue,
            case_id=case_id or f"case-{uuid.uuid4()}", task_timeout=harness.TASK_TIMEOUT)

    @asynccontextmanager
    async def open(self, order_id: str = "1234", **worker: Decider) -> AsyncIterator[Case]:
        """A started case, a Worker, and people who answer."""
        async with self.worker(**worker):
            case = await self.start(order_id)
            async with background(partial(self.world.people.converse, case)):
                yield case

    async def run(self, order_id: str = "1234", **worker: Decider) -> RefundResult:
        async with self.open(order_id, **worker) as case:
            return await case.result()


@pytest.fixture(scope="session", autouse=True)
def no_temporal_environment() -> Iterator[None]:
    """Nothing that the developer's shell says about Temporal reaches a test."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("TEMPORAL_")]:
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


status = pytest.ExitCode.OK


def pytest_sessionfinish(exitstatus: pytest.ExitCode) -> None:
    global status
    status = exitstatus


@pytest.hookimpl(trylast=True)
def pytest_unconfigure() -> None:
    """The SDK's threads can crash a Python that is shutting down; see `harness.leave`."""
    if status != pytest.ExitCode.USAGE_ERROR:  # its message comes after this
        harness.leave(int(status))
