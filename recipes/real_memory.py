"""The refund agent with a real xmemory instance in place of the fake, its schema included.

    pip install -e '.[memory]'
    XMEM_API_KEY=... python recipes/real_memory.py

Finds the instance that XMEM_INSTANCE_ID names, or else the one called `refund-agent`; if there is
none, makes it. Checks that its schema holds what the agent writes. Then plays one case, with a dev
server of its own and stand-ins for all but memory, and reads back what is remembered. XMEM_API_URL
is another address; XMEM_CLUSTER_ID is needed if the key sees several.

A run costs two reads (structured writes use no model) and leaves a case of the customer `ada`. The
instance stays, too: delete it in the console. Not covered: two runs that make it at once; and a
schema that has to change, a migration (`update_instance_schema`) that is yours to decide.

No live service was asked when this was written, only the official client over a loopback stand-in:
a second run should recall what the first one remembered.
"""

import logging
import os
import sys
import uuid
from collections.abc import Mapping
from functools import partial
from typing import Any

from temporalio.exceptions import ApplicationError

import harness
import memory_activities as memory
from harness import HarnessError
from refund_agent import Answer, Known, Question, RefundRequest, build_worker, start_case

try:
    import xmemory
except ModuleNotFoundError:
    sys.exit("xmemory is not installed. Install it with: pip install -e '.[memory]'")

NAME = "refund-agent"
TEXT = ("str", "string")  # the service's own words for it


def record(about: str, key: str, **fields: str) -> dict[str, Any]:
    return {"description": about, "primary_key": [key], "fields": {
        name: {"type": TEXT[0], "required": name == key, "description": text}
        for name, text in fields.items()}}


# No field has a default: it would be filled in again whenever a text mentions the record.
SCHEMA: dict[str, Any] = {"relations": {}, "objects": {
    "Customer": record(
        "A customer of the shop", "customer_id", customer_id="The shop's id, word for word",
        past_cases="The latest cases, one a line, such as: order 1234: refund succeeded"),
    "RefundCase": record(
        "One request for a refund, and how it ended", "case_id",
        case_id="The Workflow ID, word for word", customer_id="The customer's id in the shop",
        order_id="The order's id in the shop", outcome="How it ended, such as: refund succeeded",
        refund_id="Stripe's id of the refund, if there is one",
        refunded="Amount and currency of the refund, such as: 80.00 USD")}}


def conflicts(found: Mapping[str, Any]) -> list[str]:
    """What keeps a schema from holding the agent's records. It may hold more."""
    wrong = []
    for name, wanted in SCHEMA["objects"].items():
        given = (found.get("objects") or {}).get(name) or {}
        fields = given.get("fields") or {}
        if given.get("primary_key") != wanted["primary_key"]:
            wrong.append(f"{name} must have the primary key {wanted['primary_key'][0]}")
        wrong += [f"{name}.{field} must be a text" for field in wanted["fields"]
                  if fields.get(field, {}).get("type") not in TEXT]
        wrong += [f"{name}.{field} is required, and the agent does not know it"
                  for field in fields.keys() - wanted["fields"].keys()
                  if fields[field].get("required")]
    return wrong


async def find_or_create(client: xmemory.AsyncXmemoryClient) -> tuple[str, bool]:
    """The id of the instance, and whether it was made just now."""
    named = [os.environ.get("XMEM_INSTANCE_ID", "").strip()]
    if not named[0]:
        named = [each.id for each in await client.admin.list_instances() if each.name == NAME]
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
    made = await client.admin.create_instance(
        clusters[0], NAME, memory.to_json(SCHEMA), xmemory.SchemaType.JSON,
        description="What the refund agent remembers of past cases")
    return made.id, True


class Watched(harness.Policy):
    recalled: tuple[str, ...] | None = None

    async def decide(self, request: RefundRequest, known: Known) -> object:
        self.recalled = known.recalled
        return await super().decide(request, known)


async def reply(question: Question) -> Answer:
    return Answer(question.id, "Yes, the lid is cracked.", approve=True)


async def play(instance: memory.XmemoryInstance) -> None:
    """One case from start to end, and what memory holds of it."""
    order = harness.Fixture("1234", "", "teapot", 80_00, 200_00, "ada")
    world, decider = harness.World([order], reply, lambda call: None), Watched()
    async with harness.dev_server() as server:
        client = await server.client()
        case_id = f"refund-1234-{uuid.uuid4().hex[:8]}"
        async with build_worker(client, case_id, stripe=world.stripe, shop=world.shop,
                                decider=decider, memory=instance):
            case = await start_case(client, RefundRequest("1234", "ada", "Please refund it."),
                                    task_queue=case_id, case_id=case_id)
            async with harness.background(partial(world.people.converse, case)):
                result = await case.result()
    print(f"past cases that the agent recalled: {len(decider.recalled or ())}")
    print(f"this case: {result.outcome} {result.notice}".strip())
    scope = memory.scope_to("RefundCase", {"case_id": case_id})
    query = memory.to_json({"read_mode": "raw-tables", "scope": scope})
    read = memory.MemoryActivities(instance).read
    found = (await read(memory.ReadInput("RefundCase", query))).rows()
    if not result.remembered or len(found) != 1:
        raise HarnessError(f"xmemory holds {len(found)} records of this case; there should be one")
    print(f"xmemory holds: {', '.join(f'{name} {value}' for name, value in found[0].items())}")


async def main() -> int:
    key = os.environ.get("XMEM_API_KEY", "").strip()
    if not (key and key.isascii() and key.isprintable()):
        raise HarnessError("XMEM_API_KEY must hold the key of your xmemory account")
    try:
        async with xmemory.AsyncXmemoryClient(api_key=key) as client:
            id, made = await find_or_create(client)
            print(f"made instance {id}; from now on: export XMEM_INSTANCE_ID={id}" if made
                  else f"found instance {id}; its schema fits")
            await play(client.instance(id))
    except (ApplicationError, xmemory.XmemoryAPIError) as error:  # its own text may quote anything
        known = error if isinstance(error, ApplicationError) else memory.verdict_for(error)
        where = "check XMEM_API_KEY, XMEM_INSTANCE_ID and XMEM_API_URL"
        raise HarnessError(f"{known.message}; {where}") from None
    return 0


if __name__ == "__main__":
    # That a customer is new, the agent learns from a read that is refused: no cause for alarm.
    logging.getLogger("temporalio.activity").setLevel(logging.ERROR)
    harness.run(main)
