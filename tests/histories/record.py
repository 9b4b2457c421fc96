"""Record the history that test_10_replay.py replays.

    PYTHONPATH=tests python tests/histories/record.py

Run it only when the loop is meant to change, and read the difference.
"""

import asyncio
import json
import re
from pathlib import Path

import harness
from desk import Desk, Replaying

HISTORY = Path(__file__).with_name("escalated.json")


async def record() -> None:
    async with harness.dev_server(*harness.FAST_TIMERS) as server:
        desk = Desk(await server.client(plugins=[Replaying("replaying")]))
        async with desk.open("1235") as case:
            await case.result()
        text = (await case.fetch_history()).to_json()
    text = re.sub(r'"identity": "[^"]*"', '"identity": "worker"', text)  # no host name, no pid
    HISTORY.write_text(json.dumps(json.loads(text), indent=1) + "\n")


if __name__ == "__main__":
    asyncio.run(record())
    harness.leave(0)
