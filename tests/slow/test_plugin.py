"""The plugin: one registration on the Client, one client of xmemory for all its Workers."""

import asyncio
import importlib
import re
import sys
import uuid
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from temporalio import workflow
from temporalio.client import Client
from temporalio.worker import Worker

from desk import ROOT
from fake_xmemory import FakeXmemory
from memory_activities import XmemoryPlugin, memory_for_workflow

KEY = "xmem_CANARY"


class Connections:
    """Stands where the real client is made: hands out clients of one stand-in."""

    def __init__(self) -> None:
        self.xmemory, self.made, self.closed = FakeXmemory({}), 0, 0
        self.arguments: list[str] = []

    def connect(self, *, api_key: str) -> Any:
        self.made += 1
        self.arguments.append(api_key)
        return SimpleNamespace(instance=self.instance, aclose=self.aclose)

    def instance(self, instance_id: str) -> FakeXmemory:
        self.arguments.append(instance_id)
        return self.xmemory

    async def aclose(self) -> None:
        self.closed += 1


@pytest.fixture
def connections(monkeypatch: pytest.MonkeyPatch) -> Connections:
    monkeypatch.setenv("XMEM_API_KEY", KEY)
    monkeypatch.setenv("XMEM_INSTANCE_ID", "an-instance")
    monkeypatch.delenv("XMEM_API_URL", raising=False)
    return Connections()


@workflow.defn(sandboxed=False)
class Remembers:
    @workflow.run
    async def run(self) -> str:
        return (await memory_for_workflow().write_async("Ann: likes tea")).write_id


def worker(client: Client, queue: str) -> Worker:
    return Worker(client, task_queue=queue, workflows=[Remembers])


async def remember(client: Client, queue: str) -> str:
    return await client.execute_workflow(Remembers.run, id=str(uuid.uuid4()), task_queue=queue)


async def test_the_first_worker_opens_the_client_and_the_last_one_closes_it(
    client: Client, connections: Connections
) -> None:
    config = client.config()
    config["plugins"] = [XmemoryPlugin(connect=connections.connect)]
    client, first, second = Client(**config), str(uuid.uuid4()), str(uuid.uuid4())
    async with worker(client, first):
        async with worker(client, second):
            await asyncio.gather(remember(client, first), remember(client, second))
        assert (connections.made, connections.closed) == (1, 0)
        await remember(client, first)
    assert (connections.made, connections.closed) == (1, 1)
    async with worker(client, second):
        await remember(client, second)
    assert (connections.made, connections.closed) == (2, 2)
    assert connections.arguments == [KEY, "an-instance"] * 2


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("XMEM_API_KEY", ""),
        ("XMEM_API_KEY", "kéy"),
        ("XMEM_INSTANCE_ID", " "),
        ("XMEM_API_URL", "localhost:8000"),
    ],
)
def test_a_variable_that_is_missing_or_malformed_is_named_when_the_plugin_is_made(
    connections: Connections, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=f"^{name}"):
        XmemoryPlugin(connect=connections.connect)
    assert not connections.made


async def test_the_example_of_the_readme_works(
    client: Client, connections: Connections, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    readme = (ROOT / "README.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    (code,) = [block for block in blocks if "XmemoryPlugin" in block]
    address = client.service_client.config.target_host
    (tmp_path / "readme_example.py").write_text(code.replace("localhost:7233", address))
    monkeypatch.syspath_prepend(str(tmp_path))
    real = SimpleNamespace(AsyncXmemoryClient=connections.connect)
    monkeypatch.setitem(sys.modules, "xmemory", real)
    example = importlib.import_module("readme_example")
    running = asyncio.create_task(example.main())
    answer = await client.execute_workflow(
        "Greeter", args=["Ann", "I like tea"], id=str(uuid.uuid4()), task_queue="greetings"
    )
    assert "tea" in answer
    running.cancel()
    await asyncio.wait([running])
    assert connections.closed == 1
