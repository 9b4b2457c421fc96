"""A whole kill, step by step. To kill an agent of yours, copy this file and `harness.py`.

Three processes take part. This one, the parent, holds the world: Stripe, the shop, xmemory, the
people and the ledger of all calls. The first Worker dies by SIGKILL. The second one goes on. The
Temporal server is a fourth; the fixture `server` of `desk.py` has started it.

The same refund in a process that keeps its place in its own memory is the last test.
"""

from typing import Any

import harness
from desk import Quiet
from harness import AnnounceActivities, DevServer
from refund_agent import HUMAN, RefundActivities, build_worker, start_case
from run_demo import DemoWorker, Plain, connect, request_for

SECONDS = 60  # for any step of a Worker, on a busy machine


async def worker(remote: Any, address: str, task_queue: str) -> None:
    """What a child does: it is one Worker.

    `remote` is the parent's world. `remote.stripe` and the others look like clients, and every call
    of them is carried out in the parent. AnnounceActivities lets each Activity tell the parent
    where it is. The Activities themselves do not know of it. DemoWorker sets how long a Workflow
    Task waits for a dead Worker: 0.2 seconds instead of ten.
    """
    plugin = DemoWorker("demo", interceptors=[AnnounceActivities(remote)])
    client = await connect(address, plugins=[plugin])
    activities = RefundActivities(remote.stripe, remote.shop, remote.decide)
    await build_worker(client, task_queue, activities, remote.xmemory).run()


async def test_a_worker_is_killed_before_the_refund_and_another_one_makes_it(
    server: DevServer,
) -> None:
    # A world with a customer and a reviewer who answer, and one case in it.
    world = Quiet(request_for("1235").order_id)  # 150.00, so a reviewer must approve
    client = await server.client()
    case = await start_case(client, world.request, task_queue=world.name)
    job = "the Worker", "test_01_a_kill:worker", await server.address(), world.name

    # Whichever process comes to this point is held there. `trapped` is set when one has come.
    trapped = world.arm("before issue_refund")
    async with world.attending(case):
        async with harness.child(*job, world=world) as first:
            await first.until(trapped, SECONDS, "the refund")
            before = world.count()
            await first.kill()  # SIGKILL, and the process is reaped

        # Nothing runs now. The questions, the answers, the approval and every result so far are in
        # Event History. A Worker that was never told of this case gets it from the Task Queue.
        async with harness.child(*job, world=world) as second:
            await second.until(world.ended, SECONDS, "the result")

    # The result is an ordinary one.
    assert world.result and world.result.outcome == "refund succeeded" and world.result.remembered
    # Both processes did something, and nothing but the refund and what follows it came after.
    assert {call.pid for call in world.calls} == {first.pid, second.pid}
    after = world.count()
    for done in ("questions to the customer", "questions to the reviewer", "decisions made"):
        assert after[done] == before[done] > 0
    # The money moved once. The ledger says so, not the agent.
    assert (before["refunds"], after["refunds"]) == (0, 1)
    assert after["cases remembered"] == 1


async def test_a_plain_process_that_is_killed_in_its_refund_starts_over() -> None:
    plain = Plain("1234", "refund-in-flight")  # killed while Stripe has the request
    await plain.play()
    count = plain.count()
    # The second process asks both questions and makes all five decisions again.
    assert (count["questions to the customer"], count["decisions made"]) == (4, 10)
    # The idempotency key also saves the money here. But this process does not know it.
    assert plain.killed_at and count["refunds"] == 1
    assert plain.result and plain.result.outcome == HUMAN
