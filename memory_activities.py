"""Long-term memory (xmemory) for Temporal Workflows. Copy this file; it needs nothing beside it.

Memory is what an agent carries from one run to the next. It is not where the work stands (that is
Event History) and not whether an effect happened (its owner knows). Three rules hold here:

* a free-text write is made at most once, because extracting it a second time may file the same
  fact under another key; a structured mutation carries its key and is retried;
* Temporal owns every retry and every wait, also the wait for a queued write;
* no key, no transport text and no content reaches the title of a failure or a summary.

In a Workflow: `memory = memory_for_workflow()`, then `await memory.read("...")` and so on.
In a Worker: `activities=MemoryActivities(instance).all()`, with `instance` as in
`AsyncXmemoryClient(...).instance("...")`, or anything that has its four methods.

Texts, queries and results are Activity inputs and results, so they are in Event History in clear.
Use a payload codec if they must not be.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from functools import wraps
from typing import Any, ParamSpec, Protocol, TypeVar

from temporalio import activity, workflow
from temporalio.common import RetryPolicy
from temporalio.exceptions import (
    ActivityError,
    ApplicationError,
    ApplicationErrorCategory,
    RetryState,
)

# --- Constants, each with its reason -------------------------------------------------------------

HEARTBEAT_TIMEOUT = timedelta(seconds=10)  # how long the death of a Worker may go unnoticed
BEATS_PER_TIMEOUT = 4  # three may be late or lost before an attempt is given up

READ_BUDGET = timedelta(seconds=120)  # a deep read of a large instance takes a minute or two
WRITE_BUDGET = timedelta(seconds=180)  # `write` returns when the extraction is applied
QUEUE_BUDGET = timedelta(seconds=30)  # `write_async` and `write_status` only touch the queue
CLIENT_MARGIN = timedelta(seconds=5)  # the client gives up first: its error says more than Temporal's
CLIENT_SHARE = 0.8  # of a budget too short for that margin

READ_RETRY = RetryPolicy(maximum_interval=timedelta(seconds=30), maximum_attempts=10)
ONCE = RetryPolicy(maximum_attempts=1)  # free text: see the first rule above
STRUCTURED_RETRY = RetryPolicy(maximum_interval=timedelta(seconds=30), maximum_attempts=10)

MAX_WAIT = timedelta(minutes=15)  # a long extraction takes minutes
FIRST_POLL_DELAY, POLL_GROWTH, LAST_POLL_DELAY = 2.0, 1.5, 30.0  # seconds, factor, seconds
MAX_RETRY_AFTER = timedelta(hours=1)  # a server's hint may say a day; nobody looks for that long

# --- Heartbeats ----------------------------------------------------------------------------------

P = ParamSpec("P")
R = TypeVar("R")


def heartbeating(run: Callable[P, Awaitable[R]]) -> Callable[P, Awaitable[R]]:
    """Let an async Activity heartbeat for as long as it runs; outside an Activity, do nothing.

    A Worker that dies is noticed after the heartbeat timeout instead of the start-to-close timeout.
    Without the beats that timeout would be a trap: the attempt is given up, but goes on running, and
    the next one overlaps it.
    """

    @wraps(run)
    async def beating(*args: P.args, **kwargs: P.kwargs) -> R:
        timeout = activity.info().heartbeat_timeout if activity.in_activity() else None
        if timeout is None:
            return await run(*args, **kwargs)
        beat = asyncio.create_task(_beat(timeout.total_seconds() / BEATS_PER_TIMEOUT))
        try:
            return await run(*args, **kwargs)
        finally:
            beat.cancel()

    return beating


async def _beat(seconds: float) -> None:
    while True:
        activity.heartbeat()
        await asyncio.sleep(seconds)


# --- Errors: one table ---------------------------------------------------------------------------
# An error of the client is known by its attributes (`status`, `code`, `details`, `retry_after`),
# never by its class, so that this file needs no client library. Type strings are stable: match them
# in a RetryPolicy or an `except`. Messages are fixed, because Event History shows them in clear.


@dataclass(frozen=True)
class Verdict:
    type: str
    retryable: bool
    message: str


UNAVAILABLE = Verdict("XmemoryUnavailable", True, "xmemory did not answer")
SERVER_ERROR = Verdict("XmemoryServerError", True, "xmemory answered with a server error")
RATE_LIMITED = Verdict("XmemoryRateLimited", True, "xmemory asked to slow down")
DAILY_QUOTA = Verdict("XmemoryDailyQuotaExceeded", True, "the daily xmemory quota is used up")
MONTHLY_QUOTA = Verdict("XmemoryMonthlyQuotaExceeded", False, "the monthly xmemory quota is used up")
QUOTA = Verdict("XmemoryQuotaExceeded", False, "an xmemory quota is used up")
AUTH_FAILED = Verdict("XmemoryAuthFailed", False, "xmemory refused the API key; check its variable")
NOT_FOUND = Verdict("XmemoryNotFound", False, "xmemory has no such instance or record")
BAD_REQUEST = Verdict("XmemoryBadRequest", False, "xmemory refused the request as malformed")
SCHEMA_REJECTED = Verdict("XmemorySchemaRejected", False, "xmemory refused the schema request")
WRITE_FAILED = Verdict("XmemoryWriteFailed", False, "xmemory could not apply the write")
WRITE_NOT_FOUND = Verdict("XmemoryWriteNotFound", False, "xmemory does not know this write")
WRITE_TIMEOUT = Verdict("XmemoryWriteTimeout", False, "the write did not finish within max_wait")
WRITE_PENDING = Verdict("XmemoryWritePending", True, "the write has not finished yet")
CONFLICT = Verdict("XmemoryConflict", False, "the record exists with other values")
UNKNOWN = Verdict("XmemoryUnknown", True, "xmemory answered with a code this file does not know")

BY_CODE = {
    "UNAUTHORIZED": AUTH_FAILED,
    "FORBIDDEN": AUTH_FAILED,
    "NOT_FOUND": NOT_FOUND,
    "VALIDATION_ERROR": BAD_REQUEST,
    "INVALID_INPUT": BAD_REQUEST,
    "ALREADY_EXISTS": BAD_REQUEST,
    "CONFLICT": BAD_REQUEST,
    "RATE_LIMITED": RATE_LIMITED,
    "INTERNAL_ERROR": SERVER_ERROR,
    "SERVICE_UNAVAILABLE": SERVER_ERROR,
    "MAX_RETRIES_EXCEEDED": WRITE_FAILED,
} | dict.fromkeys(
    (
        "stale_proposal_version",
        "stale_schema_version",
        "dependency_closure_failed",
        "destructive_confirmation_required",
        "non_additive_change_requires_plan",
        "migration_not_found",
        "instance_not_initialised",
        "invalid_decision_input",
    ),
    SCHEMA_REJECTED,
)
BY_QUOTA_KIND = {"daily_quota_exceeded": DAILY_QUOTA, "monthly_quota_exceeded": MONTHLY_QUOTA}
BY_STATUS = {401: AUTH_FAILED, 403: AUTH_FAILED, 404: NOT_FOUND, 408: SERVER_ERROR, 429: RATE_LIMITED}


def verdict_for(error: Exception) -> Verdict:
    """The row of the table for an error of the client. An unknown code is retryable: a newer server
    must not break an older Worker."""
    status: int = getattr(error, "status", None) or 0
    code: str | None = getattr(error, "code", None)
    details = getattr(error, "details", None)
    if code is None and not status:
        return BAD_REQUEST if isinstance(error, ValueError | TypeError) else UNAVAILABLE
    if code == "QUOTA_EXCEEDED":
        kind = details.get("kind") if isinstance(details, Mapping) else None
        return BY_QUOTA_KIND.get(str(kind), QUOTA)
    if code is not None:
        return BY_CODE.get(code, UNKNOWN)
    rest = SERVER_ERROR if status >= 500 else BAD_REQUEST if status >= 400 else UNKNOWN
    return BY_STATUS.get(status, rest)


def application_error(
    verdict: Verdict, *details: Any, delay: timedelta | None = None
) -> ApplicationError:
    return ApplicationError(
        verdict.message,
        *details,
        type=verdict.type,
        non_retryable=not verdict.retryable,
        next_retry_delay=delay if verdict.retryable else None,
        category=ApplicationErrorCategory.BENIGN
        if verdict is WRITE_PENDING
        else ApplicationErrorCategory.UNSPECIFIED,
    )


@contextmanager
def mapped_errors() -> Iterator[None]:
    """Turn an error of the client into a row of the table. `from None` keeps its text, which may
    quote a URL or a key, out of Event History."""
    try:
        yield
    except ApplicationError:
        raise
    except Exception as error:
        hint = getattr(error, "retry_after", None)
        details = getattr(error, "details", None)
        if hint is None and isinstance(details, Mapping):
            hint = details.get("retry_after_seconds")
        delay = None if hint is None else min(timedelta(seconds=hint), MAX_RETRY_AFTER)
        facts = {"code": getattr(error, "code", None), "status": getattr(error, "status", None)}
        raise application_error(verdict_for(error), facts, delay=delay) from None


# --- What crosses the Activity boundary ----------------------------------------------------------
# JSON travels as text. A typed union would not come back as it went: the SDK's converter reads 1.5
# as 1 when an int is allowed too.

Mutation = Mapping[str, Any]
Scope = Mapping[str, Any]


@dataclass(frozen=True)
class ReadInput:
    query: str
    read_mode: str = "single-answer"
    scope_json: str | None = None


@dataclass(frozen=True)
class ReadOutput:
    """`reader_result` None: the schema cannot hold the concept. `notice` set: not answered as asked,
    which says nothing about the data. Empty rows without a notice: nothing matches."""

    reader_result_json: str
    notice: str | None = None
    trace_id: str | None = None

    @property
    def reader_result(self) -> Any:
        """As in the client: text, or `{columns, rows}`, or `{objects, relations}`, or None."""
        return json.loads(self.reader_result_json)

    def rows(self) -> list[dict[str, Any]]:
        """The rows of a `raw-tables` read, each as `{column: value}`."""
        table = self.reader_result or {"columns": [], "rows": []}
        names = [column["name"] for column in table["columns"]]
        return [dict(zip(names, row, strict=True)) for row in table["rows"]]


@dataclass(frozen=True)
class WriteInput:
    text: str = ""
    mutations_json: str | None = None
    extraction_logic: str = "fast"
    scope_json: str | None = None

    def arguments(self) -> dict[str, Any]:
        """The keyword arguments of the client's `write` and `write_async`."""
        if self.mutations_json is not None:
            return {"structured_mutations": json.loads(self.mutations_json)}
        scope = {} if self.scope_json is None else {"scope": json.loads(self.scope_json)}
        return {"text": self.text, "extraction_logic": self.extraction_logic} | scope


@dataclass(frozen=True)
class WriteOutput:
    write_id: str
    trace_id: str | None = None


@dataclass(frozen=True)
class WriteStatus:
    """`write_status` is queued, processing, extracting, extracted, applying, completed, failed or
    not_found; a newer server may say something else, which means: not finished."""

    write_id: str
    write_status: str
    error_detail: str | None = None


@dataclass(frozen=True)
class WaitInput:
    write_id: str
    max_wait_seconds: float
    mutations_json: str | None = None


def create(object_type: str, key: Mapping[str, Any], values: Mapping[str, Any]) -> Mutation:
    """A new record. Refused by xmemory if the key exists; the Activities here then read the record
    and call it done if it holds these very values."""
    return {"object_mutation": {"object_type": object_type,
                                "create": {"key": dict(key), "values": dict(values)}}}  # fmt: skip


def update(object_type: str, key: Mapping[str, Any], values: Mapping[str, Any]) -> Mutation:
    """New values for a record that exists; None clears a field. The same again changes nothing."""
    return {"object_mutation": {"object_type": object_type,
                                "update": {"key": dict(key), "values": dict(values)}}}  # fmt: skip


def scope_to(object_type: str, key: Mapping[str, Any]) -> Scope:
    """Bind a read, or a write of text, to one record and what belongs to it."""
    return {"objects": [{"type": object_type, "key": {"key": dict(key)}}]}


# --- The Activities ------------------------------------------------------------------------------


class XmemoryInstance(Protocol):
    """The part of the client's instance handle that is used here."""

    async def read(self, query: str, **options: Any) -> Any: ...
    async def write(self, text: str = "", **options: Any) -> Any: ...
    async def write_async(self, text: str = "", **options: Any) -> Any: ...
    async def write_status(self, write_id: str, **options: Any) -> Any: ...


class MemoryActivities:
    """xmemory as Activities. The names are part of every open Workflow's history: do not rename."""

    def __init__(self, instance: XmemoryInstance) -> None:
        self._instance = instance

    def all(self) -> list[Callable[..., Any]]:
        """The methods to register on a Worker."""
        return [self.read, self.write, self.write_async, self.write_status, self.wait_for_write]

    @activity.defn(name="xmemory_read")
    @heartbeating
    async def read(self, input: ReadInput) -> ReadOutput:
        scope = None if input.scope_json is None else json.loads(input.scope_json)
        with mapped_errors():
            found = await self._instance.read(
                input.query, read_mode=input.read_mode, scope=scope, timeout=client_timeout()
            )
        return ReadOutput(json.dumps(found.reader_result), found.notice, found.trace_id)

    @activity.defn(name="xmemory_write")
    @heartbeating
    async def write(self, input: WriteInput) -> WriteOutput:
        """Returns when the write is applied."""
        return await self._enqueue(self._instance.write, input)

    @activity.defn(name="xmemory_write_async")
    @heartbeating
    async def write_async(self, input: WriteInput) -> WriteOutput:
        """Returns when the write is queued. Every call is a job of its own."""
        return await self._enqueue(self._instance.write_async, input)

    async def _enqueue(self, call: Callable[..., Awaitable[Any]], input: WriteInput) -> WriteOutput:
        try:
            with mapped_errors():
                written = await call(**input.arguments(), timeout=client_timeout())
        except ApplicationError as refused:
            if refused.type != BAD_REQUEST.type or not await self._exists(input.mutations_json):
                raise
            return WriteOutput(write_id="")  # an earlier attempt wrote it; its answer was lost
        return WriteOutput(written.write_id, written.trace_id)

    @activity.defn(name="xmemory_write_status")
    @heartbeating
    async def write_status(self, write_id: str) -> WriteStatus:
        with mapped_errors():
            return await self._status(write_id)

    @activity.defn(name="xmemory_wait_for_write")
    @heartbeating
    async def wait_for_write(self, input: WaitInput) -> WriteStatus:
        """Ask once how the write stands. Not finished yet is a retryable failure with a delay: the
        Temporal server does the waiting, no Worker slot is held, Event History does not grow."""
        with mapped_errors():
            status = await self._status(input.write_id)
        facts = {"write_id": input.write_id, "write_status": status.write_status}
        if status.write_status == "completed":
            return status
        if status.write_status == "not_found":
            raise application_error(WRITE_NOT_FOUND, facts)
        if status.write_status == "failed":
            if await self._exists(input.mutations_json):
                return status
            raise application_error(WRITE_FAILED, facts | {"error_detail": status.error_detail})
        raise _not_finished(facts, timedelta(seconds=input.max_wait_seconds))

    async def _status(self, write_id: str) -> WriteStatus:
        try:
            found = await self._instance.write_status(write_id, timeout=client_timeout())
        except ValueError:  # the real client refuses to parse a status it does not know
            return WriteStatus(write_id, "unknown")
        return WriteStatus(write_id, str(found.write_status), found.error_detail)

    async def _exists(self, mutations_json: str | None) -> bool:
        """Whether every mutation is a create whose record is there with these very values. False if
        one is no create or not there; a typed final error if it is there with other values."""
        for mutation in json.loads(mutations_json or "[]"):
            wanted = mutation.get("object_mutation", {})
            if "create" not in wanted:
                return False
            key, values = wanted["create"]["key"], wanted["create"]["values"]
            scope_json = json.dumps(scope_to(wanted["object_type"], key))
            try:
                found = await self.read(ReadInput(wanted["object_type"], "raw-tables", scope_json))
            except ApplicationError as error:
                if error.type == BAD_REQUEST.type:  # a scope to a record that is not there
                    return False
                raise
            rows = [row for row in found.rows() if all(row.get(k) == v for k, v in key.items())]
            if not rows:
                return False
            if any(rows[0].get(name) != value for name, value in values.items()):
                raise application_error(CONFLICT, {"object_type": wanted["object_type"]})
        return mutations_json is not None


def client_timeout() -> float | None:
    """Seconds the client may take: always less than Temporal gives the Activity."""
    if not activity.in_activity() or (given := activity.info().start_to_close_timeout) is None:
        return None
    return max((given - CLIENT_MARGIN).total_seconds(), 0.0) or given.total_seconds() * CLIENT_SHARE


def _not_finished(facts: dict[str, str], max_wait: timedelta) -> ApplicationError:
    """The next poll comes later and later, but one always falls on the deadline itself: the server
    ends a retry early when its delay would pass the schedule-to-close timeout, which therefore lies
    one attempt behind the deadline."""
    if not activity.in_activity():
        return application_error(WRITE_PENDING, facts)
    info = activity.info()
    left = (info.scheduled_time + max_wait - datetime.now(timezone.utc)).total_seconds()
    if left <= 0:
        return application_error(WRITE_TIMEOUT, facts)
    delay = min(FIRST_POLL_DELAY * POLL_GROWTH ** min(info.attempt - 1, 10), LAST_POLL_DELAY, left)
    return application_error(WRITE_PENDING, facts, delay=timedelta(seconds=delay))


# --- The handle a Workflow uses ------------------------------------------------------------------


@dataclass(frozen=True)
class WorkflowMemory:
    """Made by `memory_for_workflow`. Each method is the client's own, run as an Activity."""

    read_timeout: timedelta
    write_timeout: timedelta
    read_retry_policy: RetryPolicy
    write_retry_policy: RetryPolicy | None
    heartbeat_timeout: timedelta

    async def read(
        self, query: str, *, read_mode: str = "single-answer", scope: Scope | None = None
    ) -> ReadOutput:
        if not query.strip():
            raise _wrong("read() needs a query")
        return await workflow.execute_activity_method(
            MemoryActivities.read,
            ReadInput(query, read_mode, None if scope is None else json.dumps(scope)),
            start_to_close_timeout=self.read_timeout,
            heartbeat_timeout=self.heartbeat_timeout,
            retry_policy=self.read_retry_policy,
            summary=f"xmemory read: {len(query)} chars",
        )

    async def write(self, text: str = "", **options: Any) -> WriteOutput:
        """Write and wait until it is applied; takes what `write_durable` takes but `max_wait`."""
        input = _write_input(text, **options)
        return await workflow.execute_activity_method(
            MemoryActivities.write,
            input,
            start_to_close_timeout=self.write_timeout,
            heartbeat_timeout=self.heartbeat_timeout,
            retry_policy=self._write_retry(input),
            summary=f"xmemory write: {len(input.text)} chars",
        )

    async def write_async(self, text: str = "", **options: Any) -> WriteOutput:
        """Queue a write and go on; ask `write_status` for it later."""
        return await self._enqueue(_write_input(text, **options))

    async def write_status(self, write_id: str) -> WriteStatus:
        return await workflow.execute_activity_method(
            MemoryActivities.write_status,
            write_id,
            start_to_close_timeout=QUEUE_BUDGET,
            heartbeat_timeout=self.heartbeat_timeout,
            retry_policy=self.read_retry_policy,
            summary="xmemory write_status",
        )

    async def write_durable(
        self, text: str = "", *, max_wait: timedelta = MAX_WAIT, **options: Any
    ) -> WriteStatus:
        """Queue a write and wait for it, however often Workers die meanwhile.

        Two Activities, so the same few events in history whether it takes seconds or days. Takes
        `structured_mutations=[create(...), ...]`, or a text with `extraction_logic` and `scope`.
        Raises ActivityError whose cause has type XmemoryWriteFailed or XmemoryWriteNotFound, and
        ApplicationError of type XmemoryWriteTimeout, which carries the write id to ask for later.
        """
        input = _write_input(text, **options)
        queued = await self._enqueue(input)
        if not queued.write_id:
            return WriteStatus("", "completed")
        wait = WaitInput(queued.write_id, max_wait.total_seconds(), input.mutations_json)
        try:
            return await workflow.execute_activity_method(
                MemoryActivities.wait_for_write,
                wait,
                start_to_close_timeout=QUEUE_BUDGET,
                schedule_to_close_timeout=max_wait + QUEUE_BUDGET,
                heartbeat_timeout=self.heartbeat_timeout,
                summary=f"xmemory wait for write {queued.write_id}",
            )
        except ActivityError as error:
            # At the deadline the cause is the last failure or a timeout, as it happens to fall.
            late = isinstance(error.cause, ApplicationError) and error.cause.type == WRITE_TIMEOUT.type
            if late or error.retry_state == RetryState.TIMEOUT:
                raise application_error(WRITE_TIMEOUT, {"write_id": queued.write_id}) from error
            raise

    async def _enqueue(self, input: WriteInput) -> WriteOutput:
        return await workflow.execute_activity_method(
            MemoryActivities.write_async,
            input,
            start_to_close_timeout=QUEUE_BUDGET,
            heartbeat_timeout=self.heartbeat_timeout,
            retry_policy=self._write_retry(input),
            summary=f"xmemory write_async: {len(input.text)} chars",
        )

    def _write_retry(self, input: WriteInput) -> RetryPolicy:
        return self.write_retry_policy or (STRUCTURED_RETRY if input.mutations_json else ONCE)


def memory_for_workflow(
    *,
    read_timeout: timedelta = READ_BUDGET,
    write_timeout: timedelta = WRITE_BUDGET,
    read_retry_policy: RetryPolicy = READ_RETRY,
    write_retry_policy: RetryPolicy | None = None,
    heartbeat_timeout: timedelta = HEARTBEAT_TIMEOUT,
) -> WorkflowMemory:
    """The handle for Workflow code. A `write_retry_policy` of your own also holds for free text:
    give one only if every key appears in the text word for word."""
    return WorkflowMemory(
        read_timeout, write_timeout, read_retry_policy, write_retry_policy, heartbeat_timeout
    )


def _write_input(
    text: str,
    *,
    structured_mutations: Sequence[Mutation] | None = None,
    extraction_logic: str = "deep",
    scope: Scope | None = None,
) -> WriteInput:
    """Refuses what the client would refuse, before anything is scheduled."""
    if bool(text.strip()) == (structured_mutations is not None):
        raise _wrong("a write needs either a text or structured_mutations")
    if structured_mutations is None:
        return WriteInput(text, None, extraction_logic, None if scope is None else json.dumps(scope))
    if not structured_mutations:
        raise _wrong("structured_mutations is empty; leave the write out")
    if scope is not None:
        raise _wrong("scope binds a text; a structured mutation carries its own key")
    return WriteInput(mutations_json=json.dumps(list(structured_mutations), sort_keys=True))


def _wrong(what: str) -> ApplicationError:
    """Fails the Workflow; another exception would only retry its Workflow Task for ever."""
    return ApplicationError(what, type=BAD_REQUEST.type, non_retryable=True)
