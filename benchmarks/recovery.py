"""How long the demo takes, and how long a refund is delayed by a kill.

    python benchmarks/recovery.py [--repeats 5]

The demo is timed as a whole process. Each crash point is played as the demo plays it: a Worker
process, a real SIGKILL, a new Worker process; and once more as people who copy will run it, with a
stock server and the SDK's default cache. The last line is JSON with the medians, in seconds.
"""

import argparse
import contextlib
import io
import json
import statistics
import subprocess
import sys
import time
import uuid
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import harness
from run_demo import CRASHES, Durable, Options


def demo_seconds() -> float:
    started = time.monotonic()
    demo = Path(__file__).resolve().parent.parent / "run_demo.py"
    subprocess.run([sys.executable, str(demo)], check=True, stdout=subprocess.DEVNULL)
    return time.monotonic() - started


STOCK = "before-refund, stock"


async def kill_once(server: harness.Server, crash: str, worker: str = "demo") -> harness.Tally:
    options = Options("1234", crash, typed=False, ui=False)
    durable = Durable(options, "worker", f"benchmark-{uuid.uuid4()}")
    job = {"temporal": server.address, "task_queue": str(uuid.uuid4()), "worker": worker}
    async with durable.world.open():
        async with harness.agent("worker", durable.world, job, durable.narrator) as first:
            with contextlib.redirect_stdout(io.StringIO()):
                await durable.play(server, first, job)
    return harness.tally(durable.world, options.request, durable.crash.killed_at)


def show(what: str, seconds: list[float]) -> float:
    median = statistics.median(seconds)
    print(f"{what:42}{len(seconds):>3}{min(seconds):>8.2f}{median:>8.2f}{max(seconds):>8.2f}")
    return round(median, 2)


async def measure(repeats: int) -> int:
    print(f"{'seconds':42}{'n':>3}{'min':>8}{'median':>8}{'max':>8}")
    demo_s = show("demo, the whole process", [demo_seconds() for _ in range(repeats)])
    tallies: dict[str, list[harness.Tally]] = {}
    async with harness.dev_server() as server:
        for crash in CRASHES:
            tallies[crash] = [await kill_once(server, crash) for _ in range(repeats)]
    async with harness.dev_server(config=()) as server:
        tallies[STOCK] = [await kill_once(server, "before-refund", "stock") for _ in range(repeats)]
    to_refund, to_end = {}, {}
    for crash, played in tallies.items():
        delays = [tally.kill_to_refund for tally in played if tally.kill_to_refund]
        if delays:  # `during-memory-write` comes after the refund
            to_refund[crash] = show(f"kill to refund, {crash}", delays)
        to_end[crash] = show(f"kill to end, {crash}", [tally.kill_to_end for tally in played])
    print(
        json.dumps(
            {"n": repeats, "demo_s": demo_s, "kill_to_refund_s": to_refund, "kill_to_end_s": to_end}
        )
    )
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    harness.run(partial(measure, parser.parse_args().repeats))
