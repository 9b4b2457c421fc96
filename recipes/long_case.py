"""A conversation of hundreds of turns, which the refund agent does not need.

    python recipes/long_case.py     150 turns on a dev server of its own; seconds, and no keys

The refund agent sends all that it knows to its decider on every turn. Event History then grows with
the square of the turns, and Temporal ends a Workflow at 50 MB or 51,200 events. Two changes keep
the history of a long conversation small. Copy the file down to "Seen to work".

* The Activity is sent a number only. It reads the conversation from its own Workflow with a Query.
  Each text is in history once. A retry on another Worker reads the same texts, because the Workflow
  stands still until the Activity has ended. A Worker that does not have the case in its cache
  replays it for the Query.
* After some turns the Workflow continues as new: the same Workflow ID, a new run, and an empty
  history. The conversation is the input of the new run.

Nothing is lost at that moment. A Signal that arrives before the run ends is handled first, because
the server refuses to end a run that has unread messages. Its text waits in `unread` and goes along.
A cancel that arrives before the run ends is raised at the next `await`. A message that arrives
later goes to the new run.

The input of a run may have 2 MB: 1,500 turns of 1 kB. A longer conversation needs a summary, or a
store of its own for the texts.
"""

import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

from temporalio import activity, workflow
from temporalio.worker import Worker

import harness

END = "bye"  # the message that ends a conversation
REPLY_TIMEOUT = timedelta(seconds=60)  # for one attempt; a killed Worker is noticed after it
Reply = Callable[[Sequence[str]], Awaitable[str]]


@dataclass(frozen=True)
class Conversation:
    """The input of a run."""

    said: Sequence[str] = ()  # message and reply by turns
    unread: Sequence[str] = ()
    turns_per_run: int = 100  # about a thousand events


@workflow.defn
class LongCase:
    @workflow.init
    def __init__(self, conversation: Conversation) -> None:
        self.said, self.unread = list(conversation.said), list(conversation.unread)

    @workflow.run
    async def run(self, conversation: Conversation) -> int:
        """Reply until the customer says bye. Returns the number of turns."""
        for _ in range(conversation.turns_per_run):
            await workflow.wait_condition(lambda: bool(self.unread))
            message = self.unread.pop(0)
            if message == END:
                return len(self.said) // 2
            self.said.append(message)
            reply = await workflow.execute_activity_method(
                Replies.reply, len(self.said), start_to_close_timeout=REPLY_TIMEOUT
            )
            self.said.append(reply)
        workflow.continue_as_new(replace(conversation, said=self.said, unread=self.unread))

    @workflow.signal
    def say(self, message: str) -> None:
        self.unread.append(message)

    @workflow.query
    def conversation(self, count: int) -> list[str]:
        return self.said[:count]


@dataclass(frozen=True)
class Replies:
    reply_to: Reply  # your model

    @activity.defn
    async def reply(self, count: int) -> str:
        """Reply to the first `count` texts of the case that this runs for."""
        info = activity.info()
        case = activity.client().get_workflow_handle_for(
            LongCase.run, info.workflow_id or "", run_id=info.workflow_run_id
        )
        return await self.reply_to(await case.query(LongCase.conversation, count))


# --- Seen to work --------------------------------------------------------------------------------


async def echo(said: Sequence[str]) -> str:
    return f"{len(said) // 2 + 1}. You said: {said[-1]}"


async def main(turns: int = 150) -> int:
    async with harness.dev_server() as server:
        client, name = await server.client(), f"long-case-{uuid.uuid4()}"
        activities = [Replies(echo).reply]
        async with Worker(client, task_queue=name, workflows=[LongCase], activities=activities):
            case = await client.start_workflow(
                LongCase.run, Conversation(), id=name, task_queue=name
            )
            for number in range(turns):
                await case.signal(LongCase.say, f"message {number}")
            await case.signal(LongCase.say, END)
            made = await case.result()
            said = await case.query(LongCase.conversation, 2 * turns)
    expected = [f"{number + 1}. You said: message {number}" for number in range(turns)]
    print(f"{made} turns, every message replied to once and in order: {said[1::2] == expected}")
    return 0 if said[1::2] == expected else 1


if __name__ == "__main__":
    harness.run(main())
