"""How long the demo takes, and how long a refund is delayed by a kill.

    python benchmarks/recovery.py [--repeats 5]

The demo is timed as a whole process. Each crash point is played as the demo plays it: a Worker
process, a real SIGKILL, a new Worker process; and once more as people who copy will run it, with a
stock server and the SDK's default cache. The last line is JSON with the medians, in seconds.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from temporalio.plugin import SimplePlugin

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import harness
import refund_agent
import run_demo


def demo_seconds() -> float:
    started = time.monotonic()
    demo = Path(__file__).resolve().parent.parent / "run_demo.py"
    subprocess.run([sys.executable, str(demo)], check=True, stdout=subprocess.DEVNULL)
    return time.monotonic() - started


STOCK = "before-refund, stock"
TO_REFUND, TO_END = "seconds from kill to refund", "seconds from kill to the end"


class Quiet(run_demo.Durable):
    def say(self, actor: str, text: str) -> None: ...


class Stock(Quiet):
    job = "recovery:stock_worker"


async def stock_worker(remote: Any, queue: str) -> None:
    """What `build_worker` gives, with the SDK's defaults."""
    announced = SimplePlugin("announced", interceptors=[harness.AnnounceActivities(remote)])
    client = await run_demo.connect(await remote.server(), plugins=[announced])
    activities = refund_agent.RefundActivities(remote.stripe, remote.shop, remote.decide)
    await refund_agent.build_worker(client, queue, activities, remote.xmemory).run()


async def kill_once(server: harness.DevServer, durable: Quiet) -> dict[str, Any]:
    durable.server = server.address
    async with durable.process() as first:
        await durable.play(first)
    return durable.count()


def show(what: str, seconds: list[float]) -> float:
    median = statistics.median(seconds)
    print(f"{what:42}{len(seconds):>3}{min(seconds):>8.2f}{median:>8.2f}{max(seconds):>8.2f}")
    return round(median, 2)


async def measure(repeats: int) -> int:
    print(f"{'seconds':42}{'n':>3}{'min':>8}{'median':>8}{'max':>8}")
    demo_s = show("demo, the whole process", [demo_seconds() for _ in range(repeats)])
    tallies: dict[str, list[dict[str, Any]]] = {}
    async with harness.dev_server(*harness.FAST_TIMERS) as server:
        for crash in run_demo.CRASHES:
            tallies[crash] = [await kill_once(server, Quiet("1234", crash)) for _ in range(repeats)]
    async with harness.dev_server() as server:
        tallies[STOCK] = [
            await kill_once(server, Stock("1234", "before-refund")) for _ in range(repeats)
        ]
    to_refund, to_end = {}, {}
    for crash, played in tallies.items():
        delays = [each[TO_REFUND] for each in played if each[TO_REFUND]]
        if delays:  # `during-memory-write` comes after the refund
            to_refund[crash] = show(f"kill to refund, {crash}", delays)
        to_end[crash] = show(f"kill to end, {crash}", [each[TO_END] for each in played])
    print(
        json.dumps(
            {"n": repeats, "demo_s": demo_s, "kill_to_refund_s": to_refund, "kill_to_end_s": to_end}
        )
    )
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    harness.run(measure(parser.parse_args().repeats))
