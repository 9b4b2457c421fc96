"""The plugin: one registration on the Client, a client of its own for every Worker."""

import asyncio
import importlib.util
import re
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from conftest import reply
from temporalio import workflow
from temporalio.client import Client
from temporalio.worker import Worker

import harness
from fake_xmemory import FakeXmemory
from harness import Server, World
from memory_activities import XmemoryConfig, XmemoryPlugin, memory_for_workflow
from refund_agent import build_worker

KEY = "xmem_CANARY"


class Connections:
    """Stands where the real client is made: hands out clients of one stand-in."""

    def __init__(self) -> None:
        self.xmemory, self.made, self.closed = FakeXmemory({}), 0, 0
        self.arguments: list[Any] = []

    def connect(self, url: str | None, api_key: str | None) -> Any:
        self.made += 1
        self.arguments.append((url, api_key))

        async def aclose() -> None:
            self.closed += 1

        return SimpleNamespace(instance=self.instance, aclose=aclose)

    def instance(self, instance_id: str) -> FakeXmemory:
        self.arguments.append(instance_id)
        return self.xmemory


@pytest.fixture
def connections() -> Connections:
    return Connections()


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XMEM_API_KEY", KEY)
    monkeypatch.setenv("XMEM_INSTANCE_ID", "an-instance")
    monkeypatch.delenv("XMEM_API_URL", raising=False)
    yield


@workflow.defn(sandboxed=False)
class Remembers:
    @workflow.run
    async def run(self) -> str:
        return (await memory_for_workflow().write_async("Ann: likes tea")).write_id


def worker(client: Client, queue: str = "unused", **options: Any) -> Worker:
    return Worker(client, task_queue=queue, workflows=[Remembers], **options)


async def remember(client: Client, queue: str) -> str:
    return await client.execute_workflow(Remembers.run, id=str(uuid.uuid4()), task_queue=queue)


async def connected(server: Server, *plugins: XmemoryPlugin) -> Client:
    return await harness.connect(server.address, plugins=plugins)


async def test_two_workers_of_one_client_share_nothing(
    server: Server, connections: Connections
) -> None:
    client = await connected(server, XmemoryPlugin(connect=connections.connect))
    first, second = str(uuid.uuid4()), str(uuid.uuid4())
    async with worker(client, first):
        async with worker(client, second):
            await asyncio.gather(remember(client, first), remember(client, second))
            assert (connections.made, connections.closed) == (2, 0)
        assert connections.closed == 1
        await remember(client, first)
    assert (connections.made, connections.closed) == (2, 2)
    assert connections.arguments[:2] == [(None, KEY), "an-instance"]


async def test_configuration_wins_over_the_environment_and_never_holds_the_key(
    server: Server, connections: Connections, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTHER_KEY", KEY)
    monkeypatch.delenv("XMEM_API_KEY")
    config = XmemoryConfig("another", "http://127.0.0.1:1", api_key_variable="OTHER_KEY")
    worker(await connected(server, XmemoryPlugin(config, connect=connections.connect)))
    assert connections.arguments == [("http://127.0.0.1:1", KEY), "another"]
    assert KEY not in repr(config)


@pytest.mark.parametrize(("name", "value"), [
    ("XMEM_API_KEY", ""), ("XMEM_API_KEY", " "), ("XMEM_API_KEY", "kéy"), ("XMEM_INSTANCE_ID", ""),
    ("XMEM_API_URL", "localhost:8000"),
])
async def test_a_variable_that_is_missing_or_malformed_is_named_when_the_worker_is_made(
    server: Server, connections: Connections, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    client = await connected(server, XmemoryPlugin(connect=connections.connect))
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=f"^{name}[^\n]*$") as caught:
        worker(client)
    assert not connections.made and not (value.strip() and value in str(caught.value))


async def test_registered_twice_is_refused_in_one_line(
    server: Server, connections: Connections
) -> None:
    plugin, again = [XmemoryPlugin(connect=connections.connect) for _ in range(2)]
    client = await connected(server, plugin)
    with pytest.raises(ValueError, match="^the memory Activities are registered twice: .*$"):
        worker(await connected(server, plugin, again))
    with pytest.warns(UserWarning, match="both client and worker"):
        with pytest.raises(ValueError, match="registered twice"):
            worker(client, plugins=[again])


async def test_together_with_build_worker_is_refused(
    server: Server, connections: Connections
) -> None:
    client = await connected(server, XmemoryPlugin(connect=connections.connect))
    world = World([], reply, lambda call: None)
    with pytest.raises(ValueError, match="registered twice"):
        build_worker(client, "unused", stripe=world.stripe, shop=world.shop,
                     decider=world.decider, memory=world.xmemory)


def example(folder: Path) -> ModuleType:
    """The README's example, word for word, as a module."""
    readme = Path(__file__).parent.parent / "README.md"
    blocks = re.findall(r"```python\n(.*?)```", readme.read_text(), re.DOTALL)
    (code,) = [block for block in blocks if "XmemoryPlugin" in block]
    path = folder / "readme_example.py"
    path.write_text(code)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


async def test_the_example_of_the_readme_works(
    server: Server, connections: Connections, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def client(url: str | None, *, api_key: str) -> Any:
        return connections.connect(url, api_key)

    monkeypatch.setitem(sys.modules, "xmemory", SimpleNamespace(AsyncXmemoryClient=client))
    monkeypatch.setenv("TEMPORAL_ADDRESS", str(server.address))
    monkeypatch.syspath_prepend(str(tmp_path))
    module = example(tmp_path)
    running = asyncio.create_task(module.main())
    starter = await harness.connect(server.address)
    answer = await starter.execute_workflow(
        module.Greeter.run, args=["Ann", "I like tea"], id=str(uuid.uuid4()),
        task_queue="greetings", result_type=str)
    assert "tea" in answer
    running.cancel()
    await asyncio.wait([running])
    assert connections.closed == 1
