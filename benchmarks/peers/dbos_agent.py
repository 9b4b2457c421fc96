"""DBOS with SQLite. The loop is a function with a decorator, and so is a step.

Strength: a library, not a server, and it recovers by itself when the process starts. Here it looks
for messages and at its queue every 50 ms (the default is a second). Its application version is
fixed, because otherwise a process with other source code does not recover the case.
"""

import asyncio
from typing import Any

from dbos import DBOS, SetWorkflowID

from compare import inbox

POLL_SECONDS = 0.05
world: Any = None  # set before DBOS starts
loop: asyncio.AbstractEventLoop


@DBOS.step()
def step(name: str, *args: Any) -> Any:
    """DBOS runs this in a thread."""
    return asyncio.run_coroutine_threadsafe(getattr(world, name)(*args), loop).result()


@DBOS.workflow()
def agent() -> None:
    known: list[Any] = []
    while True:
        chosen, _, about = step("model", known).partition(" ")
        if chosen == "ask":
            step("ask", about)
            known.append(DBOS.recv(about, timeout_seconds=3600))
        elif chosen == "lookup":
            known.append(step("lookup", about))
        else:
            step("refund", DBOS.workflow_id)
            return


async def run(outside: Any, store: str, id: str) -> None:
    global world, loop
    world, loop = outside, asyncio.get_running_loop()
    DBOS(
        config={
            "name": "refund-agent",
            "system_database_url": f"sqlite:///{store}",
            "application_version": "1",
            "notification_listener_polling_interval_sec": POLL_SECONDS,
        }
    )
    await asyncio.to_thread(DBOS.launch)  # recovers what was left, by way of the queue
    await DBOS.register_queue_async("agents", polling_interval_sec=POLL_SECONDS)
    with SetWorkflowID(id):  # a case of this id is started once
        case = await asyncio.to_thread(DBOS.enqueue_workflow, "agents", agent)
    async with inbox(world, lambda question, text: DBOS.send_async(id, text, question)):
        await asyncio.to_thread(case.get_result)
