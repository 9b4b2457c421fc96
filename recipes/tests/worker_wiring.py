"""For `recipes/worker.py --build`: the Worker of a child whose world is that of the test."""

import os
import subprocess
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from temporalio.client import Client
from temporalio.plugin import SimplePlugin
from temporalio.worker import Worker, WorkerConfig

from harness import temporal_binary
from recipes import worker as recipe
from refund_agent import RefundActivities, build_worker

remote: Any = None


async def deployed(world: Any, environment: Mapping[str, str], *arguments: str | None) -> None:
    """What `python recipes/worker.py` does, in a child of the test."""
    global remote
    remote = world
    os.environ.update(environment)
    await recipe.main(*arguments)  # type: ignore[arg-type]
    recipe.leave(0, "drained and stopped")


class Impatient(SimplePlugin):
    def __init__(self) -> None:
        super().__init__("impatient")

    def configure_worker(self, config: WorkerConfig) -> WorkerConfig:
        config["sticky_queue_schedule_to_start_timeout"] = timedelta(seconds=0.2)
        return super().configure_worker(config)


def worker(client: Client, task_queue: str) -> Worker:
    config = client.config()
    config |= {"interceptors": [], "plugins": [*config["plugins"], Impatient()]}
    steps = RefundActivities(remote.stripe, remote.shop, remote.decide)
    return build_worker(Client(**config), task_queue, steps, remote.xmemory)


def orphan(client: Client, task_queue: str) -> Worker:
    """The namespace is deleted before the first poll, so the server need not end an old one."""
    address = client.service_client.config.target_host
    delete = "operator", "namespace", "delete", "--yes", "-n", client.namespace
    command = [str(temporal_binary()), *delete, "--address", address]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return worker(client, task_queue)
