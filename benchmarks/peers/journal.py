"""A journal of finished steps, in SQLite, by hand. A step that has a row is not done again.

Strength: a page of code, no server, and nothing to wait for after a crash. What it leaves to you:
to start the process again, timers, two processes on one case, and code that changes meanwhile.
"""

import json
import sqlite3
from collections.abc import Awaitable, Callable
from typing import Any


class Journal:
    def __init__(self, store: str, id: str) -> None:
        self.db = sqlite3.connect(store, isolation_level=None)
        self.db.execute("pragma journal_mode = wal")
        self.db.execute("pragma synchronous = full")  # a row also outlives the machine's crash
        self.db.execute("create table if not exists step (id, n, result, primary key (id, n))")
        self.id, self.steps = id, 0

    async def step(self, do: Callable[..., Awaitable[Any]], *args: Any) -> Any:
        self.steps += 1
        place = self.id, self.steps
        row = self.db.execute("select result from step where id = ? and n = ?", place).fetchone()
        if row:
            return json.loads(row[0])
        result = await do(*args)
        self.db.execute("insert into step values (?, ?, ?)", (*place, json.dumps(result)))
        return result


async def run(world: Any, store: str, id: str) -> None:
    journal, known = Journal(store, id), list[str]()
    while True:
        step, _, about = (await journal.step(world.model, known)).partition(" ")
        if step == "ask":
            await journal.step(world.ask, about)
            known.append(await journal.step(world.answer, about))
        elif step == "lookup":
            known.append(await journal.step(world.lookup, about))
        else:
            await journal.step(world.refund, id)
            return
