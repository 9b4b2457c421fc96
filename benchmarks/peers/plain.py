"""A plain process. Its place is in its variables, so a new process starts over."""

from typing import Any


async def run(world: Any, store: str, id: str) -> None:
    known: list[str] = []
    while True:
        step, _, about = (await world.model(known)).partition(" ")
        if step == "ask":
            await world.ask(about)
            known.append(await world.answer(about))
        elif step == "lookup":
            known.append(await world.lookup(about))
        else:
            await world.refund(id)
            return
