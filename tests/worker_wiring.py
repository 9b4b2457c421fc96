"""For `recipes/worker.py --build`: the world is that of the test, reached over loopback."""

import os
import sys
import threading

from temporalio.client import Client
from temporalio.plugin import SimplePlugin
from temporalio.worker import Worker, WorkerConfig

from harness import STICKY, Address, Remote
from refund_agent import RefundActivities, build_worker


class Impatient(SimplePlugin):
    def __init__(self) -> None:
        super().__init__("impatient")

    def configure_worker(self, config: WorkerConfig) -> WorkerConfig:
        config["sticky_queue_schedule_to_start_timeout"] = STICKY
        return super().configure_worker(config)


def worker(client: Client, task_queue: str) -> Worker:
    threading.Thread(target=end_with_the_test, daemon=True).start()
    config = client.config()
    config |= {"interceptors": [], "plugins": [*config["plugins"], Impatient()]}
    remote = Remote(Address(int(os.environ["WORLD_PORT"]), os.environ["WORLD_TOKEN"]))
    steps = RefundActivities(stripe=remote.stripe, shop=remote.shop, decide=remote.decider.decide)
    return build_worker(Client(**config), task_queue, steps, remote.xmemory)


def end_with_the_test() -> None:
    sys.stdin.read()
    os._exit(1)
