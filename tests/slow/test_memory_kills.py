"""What becomes of a write when its Worker is killed. The Worker is `bare_worker.py`."""

import asyncio
import shutil
import sys
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from temporalio.client import Client, WorkflowHandle

import memory_activities


class Desk:
    """A folder that is the memory, a Workflow that writes to it, and Workers that can die."""

    def __init__(self, client: Client, folder: Path) -> None:
        self.client, self.folder, self.queue = client, folder, str(uuid.uuid4())
        for file in (memory_activities.__file__, Path(__file__).with_name("bare_worker.py")):
            shutil.copy(file, folder)

    async def start(self, method: str) -> WorkflowHandle[object, str]:
        return await self.client.start_workflow(
            "Remember", method, id=self.queue, task_queue=self.queue, result_type=str
        )

    @asynccontextmanager
    async def worker(self) -> AsyncIterator[asyncio.subprocess.Process]:
        address = self.client.service_client.config.target_host
        child = await asyncio.create_subprocess_exec(
            sys.executable,
            str(self.folder / "bare_worker.py"),
            address,
            self.queue,
            stdin=asyncio.subprocess.PIPE,
            env={},
        )
        try:
            yield child
        finally:
            if child.returncode is None:
                child.kill()
            await child.wait()

    def calls(self) -> list[str]:
        calls = self.folder / "calls"
        return calls.read_text().split() if calls.exists() else []

    async def until(self, call: str) -> None:
        async with asyncio.timeout(30):
            while call not in self.calls():
                await asyncio.sleep(0.05)


@pytest.fixture
def desk(client: Client, tmp_path: Path) -> Desk:
    return Desk(client, tmp_path)


@pytest.mark.parametrize("kill", ["never", "inside a poll", "between polls"])
async def test_a_killed_wait_for_a_write_is_only_later(desk: Desk, kill: str) -> None:
    handle = await desk.start("write_durable")
    if kill == "inside a poll":
        async with desk.worker() as first:
            await desk.until("write_async")
            (desk.folder / "hold").touch()
            await asyncio.sleep(1.5)  # longer than a poll: one of them is held
            first.kill()
        (desk.folder / "hold").unlink()
    if kill == "between polls":
        async with desk.worker() as first:
            await desk.until("write_status")
            first.kill()
    async with desk.worker():
        if kill == "never":
            await desk.until("write_status")
        (desk.folder / "go").touch()
        async with asyncio.timeout(30):
            assert await handle.result() == "w2"
    assert desk.calls().count("write_async") == 1
    assert len((await handle.fetch_history()).events) <= 18


async def test_memory_copied_alone_heartbeats_on_a_bare_worker(desk: Desk) -> None:
    handle = await desk.start("write")
    async with desk.worker():
        async with asyncio.timeout(30):
            assert await handle.result() == "w1"
    assert desk.calls() == ["write"]  # without beats there would have been a second attempt
