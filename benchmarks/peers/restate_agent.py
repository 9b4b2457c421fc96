"""Restate. Its server keeps the journal, calls this process over HTTP, and again after a crash.

Strength: the loop stays a plain function, and one server binary is all that runs beside it.
"""

import asyncio
import json
from typing import Any
from urllib.request import Request, urlopen

import restate
from hypercorn.asyncio import serve
from hypercorn.config import Config

from compare import inbox

world: Any = None  # set before the first call
agent = restate.Workflow("Agent")


async def step(name: str, about: Any) -> Any:
    return await getattr(world, name)(about)


@agent.main()
async def run_case(ctx: restate.WorkflowContext) -> Any:
    known: list[Any] = []
    while True:
        chosen = await ctx.run_typed("model", step, name="model", about=known)
        kind, _, about = chosen.partition(" ")
        if kind == "refund":
            return await ctx.run_typed("refund", step, name="refund", about=ctx.key())
        found = await ctx.run_typed(kind, step, name=kind, about=about)
        known.append(await ctx.promise(about, type_hint=str).value() if kind == "ask" else found)


@agent.handler()
async def answer(ctx: restate.WorkflowSharedContext, given: list[str]) -> None:
    await ctx.promise(given[0], type_hint=str).resolve(given[1])


async def http(method: str, url: str, content: Any = None) -> None:
    data = json.dumps(content).encode() if content else None
    request = Request(
        url, data, {"Content-Type": "application/json"} if data else {}, method=method
    )
    await asyncio.to_thread(urlopen, request)


async def run(outside: Any, store: str, id: str) -> None:
    global world
    world, (ingress, admin, here) = outside, store.split()
    config = Config.from_mapping(bind=[here.removeprefix("http://")], errorlog=None)
    serving = asyncio.create_task(serve(restate.app([agent]), config))
    await http("POST", f"{admin}/deployments", {"uri": here})
    case = f"{ingress}/Agent/{id}"
    await http("POST", f"{case}/run_case/send")  # a case of this id is started once
    async with inbox(world, lambda *given: http("POST", f"{case}/answer/send", given)):
        await http("GET", f"{ingress}/restate/workflow/Agent/{id}/attach")
    serving.cancel()
