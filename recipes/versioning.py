"""Change the loop while cases are open, and learn before the deploy whether the change breaks one.

A new Worker replays open cases: it runs today's code against yesterday's Event History. If the code
now wants another step, or the steps in another order, replay fails (NondeterminismError) and the
case stands still until the code is corrected. So such a change is made in three deploys:

1. `if workflow.patched(NAME):` the new way, otherwise the old way. A case that has passed this
   place keeps to the old way. A case that comes here later takes the new way, and records that.
2. When no case of the old way is open: `workflow.deprecate_patch(NAME)`, and only the new way.
3. When the namespace has no case of step 1 any more: remove that line.

    temporal workflow list --query 'TemporalChangeVersion = "screen-before-refund"'

The example adds a step: another Activity screens a refund before money moves. The loop stays as it
is, because it is told how to act. Texts, timeouts and Activity bodies may change freely.

Run this check in CI: replay the open cases of production against the code to be deployed.

    temporal workflow show --workflow-id refund-1234-1-3f9c21ab --output json > case.json
    python recipes/versioning.py case.json ...       (in an environment that has this project)
"""

import asyncio
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from temporalio import activity, workflow
from temporalio.client import WorkflowHistory
from temporalio.worker import Replayer
from temporalio.workflow import NondeterminismError

from refund_agent import AgreedRefund, RefundAgent, RefundRequest, RefundResult, T, final_failure

SCREENED = "screen-before-refund"


@dataclass(frozen=True)
class ScreeningActivities:
    suspicious: Callable[[AgreedRefund], Awaitable[bool]]

    @activity.defn
    async def screen_refund(self, agreed: AgreedRefund) -> bool:
        """Whether a person should look at this refund before it is made."""
        return await self.suspicious(agreed)


@workflow.defn(name="RefundAgent")  # the name in the histories: it is the same Workflow, changed
class ScreeningRefundAgent(RefundAgent):
    @workflow.init
    def __init__(self, request: RefundRequest) -> None:
        super().__init__(request)

    @workflow.run
    async def run(self, request: RefundRequest) -> RefundResult:
        return await super().run(request)

    async def act(self, step: Callable[[Any, Any], Awaitable[T]], argument: Any) -> T:
        # With a refund_id, `issue_refund` only looks at a refund, and there is nothing to screen.
        pays = isinstance(argument, AgreedRefund) and not argument.refund_id
        if pays and workflow.patched(SCREENED):
            if await super().act(ScreeningActivities.screen_refund, argument):
                raise final_failure("a person should look at this refund first")
        return await super().act(step, argument)


async def does_not_replay(
    paths: Sequence[str], agent: type[RefundAgent] = ScreeningRefundAgent
) -> list[str]:
    """The histories that the Workflow can no longer replay, and why."""
    broken = []
    for path in paths:
        try:
            history = WorkflowHistory.from_json(Path(path).stem, Path(path).read_text())
            await Replayer(workflows=[agent]).replay_workflow(history)
        except (NondeterminismError, OSError, ValueError) as error:
            broken.append(f"{path}: {str(error).splitlines()[0]}")
    return broken


if __name__ == "__main__":
    if not sys.argv[1:]:
        sys.exit("Give the histories to replay: python recipes/versioning.py case.json ...")
    problems = asyncio.run(does_not_replay(sys.argv[1:]))
    print("\n".join(problems) or f"{len(sys.argv) - 1} histories replay")
    sys.exit(bool(problems))
