"""The refund agent with a real xmemory instance in place of the stand-in, its schema included.

    pip install -e '.[memory]'
    XMEM_API_KEY=... python recipes/real_memory.py

Finds the instance that XMEM_INSTANCE_ID names, or the one called `refund-agent`. If there is
none, makes it. Checks that its schema holds what the agent writes. Then plays one case on a dev
server of its own, with stand-ins for everything but memory, and reads back what is remembered.
XMEM_API_URL is another address. XMEM_CLUSTER_ID is needed if the key sees several clusters.

A run costs two reads (structured writes use no model) and leaves a record of the customer `ada`.
The instance stays as well; delete it in the console. A schema that has to change is not covered.
That is a migration (`update_instance_schema`), and yours to decide.

This was tested with the official client over a loopback stand-in, and not with the live service. A
second run should recall what the first one remembered.
"""

import asyncio
import json
import logging
import os
import sys
import uuid
from collections.abc import Mapping
from typing import Any

from temporalio.exceptions import ApplicationError

import harness
import memory_activities as memory
import run_demo
from harness import HarnessError
from refund_agent import (
    Answer,
    Known,
    Question,
    RefundActivities,
    build_worker,
    start_case,
)

try:
    import xmemory
except ModuleNotFoundError:
    sys.exit("xmemory is not installed. Install it with: pip install -e '.[memory]'")

NAME = "refund-agent"
CANDIDATE = f"{NAME}-candidate-"
SETTLE_SECONDS = 3.0  # longer than a process takes from finding no instance to having made one
TEXT = ("str", "string")  # the service's own words for it


# No field has a default: xmemory would fill it in again whenever a text mentions the record.
SCHEMA: dict[str, Any] = {
    "relations": {},
    "objects": {
        "Customer": {
            "description": "A customer of the shop",
            "primary_key": ["customer_id"],
            "fields": {
                "customer_id": {
                    "type": TEXT[0],
                    "required": True,
                    "description": "The shop's id, word for word",
                },
                "past_cases": {
                    "type": TEXT[0],
                    "required": False,
                    "description": "The latest cases, one a line, such as: "
                    "order 1234 line 1: refund succeeded",
                },
            },
        }
    },
}


def conflicts(found: Mapping[str, Any]) -> list[str]:
    """What keeps a schema from holding the agent's records. It may hold more."""
    wanted = SCHEMA["objects"]["Customer"]
    given = (found.get("objects") or {}).get("Customer") or {}
    fields, wrong = given.get("fields") or {}, []
    if given.get("primary_key") != wanted["primary_key"]:
        wrong.append("Customer must have the primary key customer_id")
    for name in wanted["fields"]:
        if fields.get(name, {}).get("type") not in TEXT:
            wrong.append(f"Customer.{name} must be a text")
    for name in fields.keys() - wanted["fields"].keys():
        if fields[name].get("required"):
            wrong.append(f"Customer.{name} is required, and the agent does not know it")
    return wrong


async def find_or_create(client: xmemory.AsyncXmemoryClient) -> tuple[str, bool]:
    """The id of the instance, and whether it was made just now."""
    given = os.environ.get("XMEM_INSTANCE_ID", "").strip()
    named = [given] if given else [id for name, id in await instances(client) if name == NAME]
    if len(named) > 1:
        raise HarnessError(f"{len(named)} instances are called {NAME}; set XMEM_INSTANCE_ID")
    if named:
        if wrong := conflicts((await client.admin.get_instance_schema(named[0])).data_schema):
            raise HarnessError(f"the schema of instance {named[0]} conflicts: {'; '.join(wrong)}")
        return named[0], False
    cluster = os.environ.get("XMEM_CLUSTER_ID", "").strip()
    clusters = [cluster] if cluster else [each.id for each in await client.admin.list_clusters()]
    if len(clusters) != 1:
        raise HarnessError(f"the key sees {len(clusters)} clusters; set XMEM_CLUSTER_ID to one")
    created = await client.admin.create_instance(
        clusters[0],
        f"{CANDIDATE}{uuid.uuid4()}",
        json.dumps(SCHEMA),
        xmemory.SchemaType.JSON,
        description="What the refund agent remembers of past cases",
    )
    # xmemory takes two instances of one name, and tells no age. So each process makes a candidate.
    # After this wait, all that started at the same time see all candidates and take the first one.
    # Only that one gets the name that a later process looks for.
    await asyncio.sleep(SETTLE_SECONDS)
    (_, first), *_ = await instances(client)
    await client.admin.patch_instance_metadata(first, name=NAME)
    if first != created.id:
        await client.admin.delete_instance(created.id)
    return first, first == created.id


async def instances(client: xmemory.AsyncXmemoryClient) -> list[tuple[str, str]]:
    """Names and ids of ours and of the candidates, in an order that is the same everywhere."""
    found = await client.admin.list_instances()
    return sorted((e.name, e.id) for e in found if e.name == NAME or e.name.startswith(CANDIDATE))


class World(run_demo.Durable):
    """The stand-ins, a customer who answers, and what the agent recalled when it decided."""

    recalled: tuple[str, ...] | None = None

    async def decide(self, known: Known) -> object:
        self.recalled = known.recalled
        return await super().decide(known)

    async def ask(self, question: Question) -> Answer:
        return run_demo.scripted(question)


async def play(instance: memory.XmemoryInstance) -> None:
    """One case from start to end, and what memory holds of it."""
    world, id = World("1234"), f"real-memory-{uuid.uuid4()}"
    steps = RefundActivities(stripe=world.stripe, shop=world.shop, decide=world.decide)
    async with harness.dev_server(*harness.FAST_TIMERS) as server:
        client = await server.client()
        async with build_worker(client, id, steps, instance):
            await world.attend(await start_case(client, world.request, task_queue=id, case_id=id))
    result = world.result
    assert result
    print(f"past cases that the agent recalled: {len(world.recalled or ())}")
    print(f"this case: {result.outcome} {result.notice}".strip())
    scope = memory.scope_to("Customer", {"customer_id": "ada"})
    query = memory.ReadInput("Customer", {"read_mode": "raw-tables", "scope": scope})
    rows = (await memory.MemoryActivities(instance).read(query)).rows()
    cases = [line for row in rows for line in row["past_cases"].splitlines()]
    if not result.remembered or cases.count(f"order 1234 line 1: {result.outcome}") != 1:
        raise HarnessError(f"xmemory does not hold this case once; it holds: {'; '.join(cases)}")
    print(f"xmemory holds: {'; '.join(cases)}")


async def main() -> int:
    key = os.environ.get("XMEM_API_KEY", "").strip()
    if not (key and key.isascii() and key.isprintable()):
        raise HarnessError("XMEM_API_KEY must hold the key of your xmemory account")
    try:
        async with xmemory.AsyncXmemoryClient(api_key=key) as client:
            id, made = await find_or_create(client)
            print(
                f"made instance {id}; from now on: export XMEM_INSTANCE_ID={id}"
                if made
                else f"found instance {id}; its schema fits"
            )
            await play(client.instance(id))
    except (ApplicationError, xmemory.XmemoryAPIError) as error:  # its own text may quote anything
        if not isinstance(error, ApplicationError):
            error = memory.failure(memory.error_type(error))
        where = "check XMEM_API_KEY, XMEM_INSTANCE_ID and XMEM_API_URL"
        raise HarnessError(f"{error.message}; {where}") from None
    return 0


if __name__ == "__main__":
    # The agent learns from a refused read that a customer is new. That is no cause for alarm.
    logging.getLogger("temporalio.activity").setLevel(logging.ERROR)
    harness.run(main())
