"""Remember in xmemory what Activities return, without touching them: an Activity interceptor.

    Worker(..., interceptors=[AutoCapture(instance, project)])

`project(activity_type, result)` is the text worth remembering, or None. It runs on the event loop,
so it must not wait for anything. Activities whose names start with `xmemory_` are memory's own and
left out. So is one of yours with such a name.

A capture never fails, repeats or outlives its Activity. So it may be lost, and only the log says
so. If the Worker dies between a capture and the report of the result, the Activity runs again and
is captured again. What must be remembered belongs in the Workflow: `write_durable`. The heartbeats
of a capture carry no details. So capture nothing of an Activity that resumes from its heartbeat.
"""

import asyncio
import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from temporalio import activity, worker

from memory_activities import XmemoryInstance, heartbeating

OWN = "xmemory_"  # how the names of the memory Activities start
CAPTURE_TIMEOUT = timedelta(seconds=5)  # queueing takes less; the Activity's slot is held meanwhile
MARGIN = timedelta(seconds=1)  # for the task's way to this Worker, and the result's way back
UNSET = timedelta(days=9999)  # in place of a timeout that is not set


@dataclass(frozen=True)
class AutoCapture(worker.Interceptor):
    instance: XmemoryInstance
    project: Callable[[str, Any], str | None]
    sample_rate: float = 1.0  # of all Activities; the others are not even projected
    capture_timeout: timedelta = CAPTURE_TIMEOUT

    def __post_init__(self) -> None:
        if not 0 <= self.sample_rate <= 1:
            raise ValueError("sample_rate must be between 0 and 1")

    def intercept_activity(self, next: worker.ActivityInboundInterceptor) -> "_Capturing":
        return _Capturing(next, self)

    def samples(self, info: activity.Info) -> bool:
        """The same for every attempt, everywhere. An activity id alone recurs in every Workflow."""
        place = (info.workflow_id, info.workflow_run_id or info.activity_run_id, info.activity_id)
        digest = hashlib.sha256(repr(place).encode()).digest()
        return int.from_bytes(digest[:4]) / 2**32 < self.sample_rate

    def ends(self, info: activity.Info, began: float) -> float:
        """By this process's clock, because the server's need not agree with it."""
        waited = info.started_time - info.scheduled_time  # both are the server's
        to_close = (info.schedule_to_close_timeout or UNSET) - waited
        allowed = min(info.start_to_close_timeout or UNSET, to_close) - MARGIN
        own = time.monotonic() + self.capture_timeout.total_seconds()
        return min(own, began + allowed.total_seconds())


class _Capturing(worker.ActivityInboundInterceptor):
    def __init__(self, next: worker.ActivityInboundInterceptor, options: AutoCapture) -> None:
        super().__init__(next)
        self._options = options

    def init(self, outbound: worker.ActivityOutboundInterceptor) -> None:
        self._outbound = outbound
        super().init(outbound)

    async def execute_activity(self, input: worker.ExecuteActivityInput) -> object:
        info, began = activity.info(), time.monotonic()
        result = await super().execute_activity(input)
        try:
            if not info.activity_type.startswith(OWN) and self._options.samples(info):
                await self._capture(info, result, began)
        except (Exception, asyncio.CancelledError) as error:  # the Activity has a result
            # Only the error's class: its text may quote a key or a customer.
            activity.logger.warning("result not captured: %s", type(error).__name__)
        return result

    async def _capture(self, info: activity.Info, result: object, began: float) -> None:
        ends = self._options.ends(info, began)
        text = self._options.project(info.activity_type, result)
        if text and ends > time.monotonic():
            super().init(self._outbound)  # a threaded Activity left a heartbeat() that blocks here
            await self._write(text, ends - time.monotonic())

    @heartbeating
    async def _write(self, text: str, seconds: float) -> None:
        """One call, also if it fails: free text is written at most once."""
        write = asyncio.ensure_future(self._options.instance.write_async(text, timeout=seconds))
        write.add_done_callback(lambda it: it.cancelled() or it.exception())  # or asyncio logs it
        try:
            if not (await asyncio.wait([write], timeout=seconds))[0]:
                raise TimeoutError
            write.result()
        finally:
            write.cancel()  # not awaited: it may ignore that
