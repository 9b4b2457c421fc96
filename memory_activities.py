"""Long-term memory (xmemory) for Temporal Workflows. Copy this file; it needs nothing beside it.

Memory is what an agent carries from one run to the next. It is not where the work stands (that is
Event History) and not whether an effect happened (its owner knows). Three rules hold here:

* a free-text write is made at most once, because a second extraction may file the same fact under
  another key; a structured mutation carries its key and is retried;
* Temporal owns every retry and every wait, also the wait for a queued write;
* no key, no transport text and no content reaches the title of a failure or a summary.

In a Workflow: `memory = memory_for_workflow()`, then `await memory.read("...")` and so on.
In a Worker: `activities=MemoryActivities(instance).all()`, where `instance` is the client's
`AsyncXmemoryClient(...).instance("...")` or anything that has its four methods.

Texts, queries and results are Activity inputs and results, so Event History holds them in clear;
use a payload codec if it must not.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import wraps
from typing import Any, NamedTuple, ParamSpec, Protocol, TypeVar

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
BEATS_PER_TIMEOUT = 4  # how often to beat; the Worker's `max_heartbeat_throttle_interval` decides
# how much of that reaches the server (by default one beat in 80% of the timeout)

READ_TIMEOUT = timedelta(seconds=120)  # a deep read of a large instance takes a minute or two
WRITE_TIMEOUT = timedelta(seconds=180)  # `write` returns when the extraction is applied
QUEUE_TIMEOUT = timedelta(seconds=30)  # `write_async` and `write_status` only touch the queue
CLIENT_MARGIN = timedelta(seconds=5)  # the client gives up first: its error says more
CLIENT_SHARE = 0.8  # of a timeout that is too short for that margin

RETRIED = RetryPolicy(maximum_interval=timedelta(seconds=30), maximum_attempts=10)
WAITING = RetryPolicy(maximum_interval=timedelta(seconds=30))  # the deadline ends it
ONCE = RetryPolicy(maximum_attempts=1)  # for free text: see the first rule

MAX_WAIT = timedelta(minutes=15)  # a long extraction takes minutes
FIRST_POLL, POLL_GROWTH, SLOWEST_POLL = 2.0, 1.5, 30.0  # seconds, factor, seconds
STEEPEST = 10  # polls after which the growth is over; a longer exponent only overflows
MAX_RETRY_AFTER = timedelta(hours=1)  # a server may say a day; nobody looks for that long

# --- Heartbeats ----------------------------------------------------------------------------------

P = ParamSpec("P")
R = TypeVar("R")
In = TypeVar("In")


def heartbeating(run: Callable[P, Awaitable[R]]) -> Callable[P, Awaitable[R]]:
    """Let an async Activity heartbeat for as long as it runs; outside an Activity, do nothing.

    With beats, the heartbeat timeout bounds how long a dead Worker goes unnoticed. Without them it
    is a trap: the attempt is given up but runs on, and the next one overlaps it.
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
# An error of the client is known by its attributes (`status`, `code`, `details`, `retry_after`), so
# this file needs no client library. Type strings are stable, to be matched in a RetryPolicy or an
# `except`. Messages are fixed, because Event History shows them in clear.


class Verdict(NamedTuple):
    type: str
    retryable: bool
    message: str


UNAVAILABLE = Verdict("XmemoryUnavailable", True, "xmemory did not answer")
SERVER_ERROR = Verdict("XmemoryServerError", True, "xmemory answered with a server error")
RATE_LIMITED = Verdict("XmemoryRateLimited", True, "xmemory asked to slow down")
DAILY_QUOTA = Verdict("XmemoryDailyQuotaExceeded", True, "the daily xmemory quota is used up")
UNKNOWN = Verdict("XmemoryUnknown", True, "xmemory answered with a code unknown to this Worker")
MONTHLY_QUOTA = Verdict("XmemoryMonthlyQuotaExceeded", False, "the monthly quota is used up")
QUOTA = Verdict("XmemoryQuotaExceeded", False, "an xmemory quota is used up")
AUTH_FAILED = Verdict("XmemoryAuthFailed", False, "xmemory refused the API key")
NOT_FOUND = Verdict("XmemoryNotFound", False, "xmemory has no such instance")
BAD_REQUEST = Verdict("XmemoryBadRequest", False, "xmemory refused the request")
SCHEMA_REJECTED = Verdict("XmemorySchemaRejected", False, "xmemory refused the schema request")
WRITE_FAILED = Verdict("XmemoryWriteFailed", False, "xmemory could not apply the write")
WRITE_NOT_FOUND = Verdict("XmemoryWriteNotFound", False, "xmemory does not know this write")
WRITE_LATE = Verdict("XmemoryWriteTimeout", False, "the write did not finish within max_wait")
WRITE_PENDING = Verdict("XmemoryWritePending", True, "the write has not finished yet")
CONFLICT = Verdict("XmemoryConflict", False, "the record exists, with other values")

BY_CODE = {
    "UNAUTHORIZED": AUTH_FAILED, "FORBIDDEN": AUTH_FAILED, "NOT_FOUND": NOT_FOUND,
    "VALIDATION_ERROR": BAD_REQUEST, "INVALID_INPUT": BAD_REQUEST, "ALREADY_EXISTS": BAD_REQUEST,
    "CONFLICT": BAD_REQUEST, "RATE_LIMITED": RATE_LIMITED, "INTERNAL_ERROR": SERVER_ERROR,
    "SERVICE_UNAVAILABLE": SERVER_ERROR, "MAX_RETRIES_EXCEEDED": WRITE_FAILED,
    "stale_proposal_version": SCHEMA_REJECTED, "stale_schema_version": SCHEMA_REJECTED,
    "dependency_closure_failed": SCHEMA_REJECTED, "migration_not_found": SCHEMA_REJECTED,
    "destructive_confirmation_required": SCHEMA_REJECTED,
    "non_additive_change_requires_plan": SCHEMA_REJECTED,
    "instance_not_initialised": SCHEMA_REJECTED, "invalid_decision_input": SCHEMA_REJECTED,
}
BY_QUOTA = {"daily_quota_exceeded": DAILY_QUOTA, "monthly_quota_exceeded": MONTHLY_QUOTA}
BY_STATUS = {401: AUTH_FAILED, 403: AUTH_FAILED, 404: NOT_FOUND, 408: SERVER_ERROR,
             429: RATE_LIMITED}


def verdict_for(error: Exception) -> Verdict:
    """An unknown code is retryable: a newer server must not break an older Worker."""
    status: int = getattr(error, "status", None) or 0
    code: str | None = getattr(error, "code", None)
    if code == "QUOTA_EXCEEDED":
        return BY_QUOTA.get(str(_details(error).get("kind")), QUOTA)
    if code is not None:
        return BY_CODE.get(code, UNKNOWN)
    if not status:
        return BAD_REQUEST if isinstance(error, ValueError | TypeError) else UNAVAILABLE
    rest = SERVER_ERROR if status >= 500 else BAD_REQUEST if status >= 400 else UNKNOWN
    return BY_STATUS.get(status, rest)


def _details(error: Exception) -> Mapping[str, Any]:
    details = getattr(error, "details", None)
    return details if isinstance(details, Mapping) else {}


def failure(verdict: Verdict, facts: Any, delay: timedelta | None = None) -> ApplicationError:
    benign = verdict is WRITE_PENDING  # waiting is no error; this keeps it out of the Worker's log
    category = ApplicationErrorCategory.BENIGN if benign else ApplicationErrorCategory.UNSPECIFIED
    return ApplicationError(
        verdict.message, facts, type=verdict.type, non_retryable=not verdict.retryable,
        next_retry_delay=delay if verdict.retryable else None, category=category)


@contextmanager
def mapped_errors(longest: float = MAX_RETRY_AFTER.total_seconds()) -> Iterator[None]:
    """Turn an error of the client into its row of the table. `from None` keeps its text, which may
    quote a URL or a key, out of Event History. A hint when to try again is heeded up to `longest`
    seconds."""
    try:
        yield
    except Exception as error:
        hint = getattr(error, "retry_after", None) or _details(error).get("retry_after_seconds")
        heeded = min(hint, longest) if isinstance(hint, int | float) and hint > 0 else None
        delay = None if heeded is None else timedelta(seconds=heeded)
        facts = {"code": getattr(error, "code", None), "status": getattr(error, "status", None)}
        raise failure(verdict_for(error), facts, delay) from None


# --- What crosses the Activity boundary ----------------------------------------------------------
# JSON travels as text: from a typed union it would not come back as it went, because the SDK's
# converter reads 1.5 as 1 where an int is allowed, too.

Mutation = Mapping[str, Any]
Scope = Mapping[str, Any]


@dataclass(frozen=True)
class ReadInput:
    query: str
    read_mode: str = "single-answer"
    scope_json: str = "null"


@dataclass(frozen=True)
class ReadOutput:
    """`reader_result` None: the schema cannot hold what was asked for. `notice` set: not answered
    as asked, which says nothing about the data. Empty without a notice: nothing matches."""

    reader_result_json: str
    notice: str | None = None
    trace_id: str | None = None

    @property
    def reader_result(self) -> Any:
        """As in the client: text, `{columns, rows}`, `{objects, relations}`, or None."""
        return json.loads(self.reader_result_json)

    def rows(self) -> list[dict[str, Any]]:
        """The rows of a `raw-tables` read, each as `{column: value}`; ValueError for another."""
        table = self.reader_result or {"columns": [], "rows": []}
        try:
            names = [column["name"] for column in table["columns"]]
            return [dict(zip(names, row, strict=True)) for row in table["rows"]]
        except (KeyError, TypeError, ValueError):
            raise ValueError("xmemory did not answer with a table") from None


@dataclass(frozen=True)
class WriteInput:
    text: str = ""
    extraction_logic: str = "fast"
    scope_json: str = "null"
    mutations_json: str = ""  # if set, instead of all the others

    def arguments(self) -> dict[str, Any]:
        """The keyword arguments of the client's `write` and `write_async`."""
        if self.mutations_json:
            return {"structured_mutations": json.loads(self.mutations_json)}
        scope = json.loads(self.scope_json)
        return {"text": self.text, "extraction_logic": self.extraction_logic, "scope": scope}


@dataclass(frozen=True)
class WriteOutput:
    """`write_id` is empty if an earlier attempt had written it and only its answer was lost."""

    write_id: str
    trace_id: str | None = None


@dataclass(frozen=True)
class WaitInput:
    write_id: str
    max_wait_seconds: float
    mutations_json: str = ""


@dataclass(frozen=True)
class WriteStatus:
    """`write_status` is queued, processing, extracting, extracted, applying, completed, failed or
    not_found; anything else, from a newer server, means: not finished."""

    write_id: str
    write_status: str
    error_detail: str | None = None


def create(object_type: str, key: Mapping[str, Any], values: Mapping[str, Any]) -> Mutation:
    """A new record. If its key exists, xmemory refuses; the Activities then read the record, and it
    is done if it holds these very values."""
    change = {"key": dict(key), "values": dict(values)}
    return {"object_mutation": {"object_type": object_type, "create": change}}


def scope_to(object_type: str, key: Mapping[str, Any]) -> Scope:
    """Bind a read, or a write of text, to one record and what belongs to it."""
    return {"objects": [{"type": object_type, "key": {"key": dict(key)}}]}


# --- The Activities ------------------------------------------------------------------------------


Method = Callable[..., Awaitable[Any]]


class XmemoryInstance(Protocol):
    """What is used of the client's instance handle: four of its coroutine methods."""

    @property
    def read(self) -> Method: ...
    @property
    def write(self) -> Method: ...
    @property
    def write_async(self) -> Method: ...
    @property
    def write_status(self) -> Method: ...


class MemoryActivities:
    """xmemory as Activities. Their names are in the history of open Workflows: do not rename."""

    def __init__(self, instance: XmemoryInstance) -> None:
        self._instance = instance

    def all(self) -> list[Callable[..., Any]]:
        """The methods to register on a Worker."""
        return [self.read, self.write, self.write_async, self.write_status, self.wait_for_write]

    @activity.defn(name="xmemory_read")
    @heartbeating
    async def read(self, input: ReadInput) -> ReadOutput:
        scope = json.loads(input.scope_json)
        with mapped_errors():
            found = await self._instance.read(
                input.query, read_mode=input.read_mode, scope=scope, timeout=client_timeout())
            return ReadOutput(json.dumps(found.reader_result), found.notice, found.trace_id)

    @activity.defn(name="xmemory_write")
    @heartbeating
    async def write(self, input: WriteInput) -> WriteOutput:
        """Returns when the write is applied."""
        return await self._write(self._instance.write, input)

    @activity.defn(name="xmemory_write_async")
    @heartbeating
    async def write_async(self, input: WriteInput) -> WriteOutput:
        """Returns when the write is queued. Every call is a job of its own."""
        return await self._write(self._instance.write_async, input)

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
        left = _seconds_left(input.max_wait_seconds)
        with mapped_errors(longest=max(left, 0.0)):
            status = await self._status(input.write_id)
        facts = {"write_id": input.write_id, "write_status": status.write_status}
        if status.write_status == "completed":
            return status
        if status.write_status == "not_found":
            raise failure(WRITE_NOT_FOUND, facts)
        if status.write_status == "failed":
            if await self._is_there(input.mutations_json):
                return status
            raise failure(WRITE_FAILED, facts | {"error_detail": status.error_detail})
        if left <= 0:
            raise failure(WRITE_LATE, facts)
        raise failure(WRITE_PENDING, facts, timedelta(seconds=min(_poll_delay(), left)))

    async def _status(self, write_id: str) -> WriteStatus:
        try:
            found = await self._instance.write_status(write_id, timeout=client_timeout())
        except ValueError:  # the real client will not parse a status that is new to it
            return WriteStatus(write_id, "unknown")
        word = getattr(found.write_status, "value", found.write_status)  # an enum, in the client
        return WriteStatus(write_id, str(word), found.error_detail)

    async def _write(self, call: Method, input: WriteInput) -> WriteOutput:
        try:
            with mapped_errors():
                written = await call(**input.arguments(), timeout=client_timeout())
        except ApplicationError as refused:
            if refused.type != BAD_REQUEST.type or not await self._is_there(input.mutations_json):
                raise
            return WriteOutput(write_id="")
        return WriteOutput(written.write_id, written.trace_id)

    async def _is_there(self, mutations_json: str) -> bool:
        """Whether all mutations are creates whose records exist with these very values; a typed
        final error if one exists with other values."""
        for mutation in json.loads(mutations_json or "[]"):
            wanted = mutation.get("object_mutation", {})
            key, values = (wanted.get("create", {}).get(name, {}) for name in ("key", "values"))
            if not key:
                return False
            scope_json = json.dumps(scope_to(wanted["object_type"], key))
            try:
                found = await self.read(ReadInput(wanted["object_type"], "raw-tables", scope_json))
            except ApplicationError as error:
                if error.type == BAD_REQUEST.type:  # a scope to a record that is not there
                    return False
                raise
            rows = [row for row in found.rows() if key.items() <= row.items()]
            if rows and not values.items() <= rows[0].items():
                raise failure(CONFLICT, {"object_type": wanted["object_type"]})
            if not rows:
                return False
        return bool(mutations_json)


def client_timeout() -> float | None:
    """Seconds that the client may take: always less than Temporal gives the Activity."""
    if not activity.in_activity() or (given := activity.info().start_to_close_timeout) is None:
        return None
    return max((given - CLIENT_MARGIN).total_seconds(), 0.0) or given.total_seconds() * CLIENT_SHARE


def _seconds_left(max_wait_seconds: float) -> float:
    """Until the deadline of a wait. One poll always falls on it, so a write that ends there is not
    lost. Temporal's own limit lies later: it drops a retry whose delay would pass that limit."""
    if not activity.in_activity():
        return max_wait_seconds
    return max_wait_seconds - (datetime.now(UTC) - activity.info().scheduled_time).total_seconds()


def _poll_delay() -> float:
    attempt = activity.info().attempt if activity.in_activity() else 1
    return min(FIRST_POLL * POLL_GROWTH ** min(attempt - 1, STEEPEST), SLOWEST_POLL)


# --- The handle a Workflow uses ------------------------------------------------------------------


@dataclass(frozen=True)
class WorkflowMemory:
    """Made by `memory_for_workflow`. The methods are the client's, run as Activities."""

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
        input = ReadInput(query, read_mode, _json(scope))
        return await self._run(MemoryActivities.read, input, self.read_timeout,
                               self.read_retry_policy, f"xmemory read: {len(query)} chars")

    async def write(self, text: str = "", **options: Any) -> WriteOutput:
        """Write and wait until it is applied. Takes what `write_durable` takes, but `max_wait`."""
        input = _write_input(text, **options)
        return await self._run(MemoryActivities.write, input, self.write_timeout,
                               self._policy(input), f"xmemory write: {len(text)} chars")

    async def write_async(self, text: str = "", **options: Any) -> WriteOutput:
        """Queue a write and go on; `write_status` says how it stands."""
        return await self._enqueue(_write_input(text, **options))

    async def write_status(self, write_id: str) -> WriteStatus:
        return await self._run(MemoryActivities.write_status, write_id, QUEUE_TIMEOUT,
                               self.read_retry_policy, "xmemory write_status")

    async def write_durable(
        self, text: str = "", *, max_wait: timedelta = MAX_WAIT, **options: Any
    ) -> WriteStatus:
        """Queue a write and wait for it, however often Workers die meanwhile.

        Two Activities, so the same few events in history whether it takes seconds or days. Takes
        `structured_mutations=[create(...), ...]`, or a text with `extraction_logic` and `scope`.
        Raises ActivityError, whose cause has the type XmemoryWriteFailed or XmemoryWriteNotFound,
        and ApplicationError of type XmemoryWriteTimeout with the write id, to ask again later.
        """
        input = _write_input(text, **options)
        write_id = (await self._enqueue(input)).write_id
        if not write_id:
            return WriteStatus(write_id, "completed")
        wait = WaitInput(write_id, max_wait.total_seconds(), input.mutations_json)
        try:
            return await self._run(MemoryActivities.wait_for_write, wait, QUEUE_TIMEOUT, WAITING,
                                   "xmemory wait for write", limit=max_wait + QUEUE_TIMEOUT)
        except ActivityError as error:
            # With no Worker alive at the deadline it is the server's timeout, else our own verdict.
            ours = isinstance(error.cause, ApplicationError) and error.cause.type == WRITE_LATE.type
            if ours or error.retry_state == RetryState.TIMEOUT:
                raise failure(WRITE_LATE, {"write_id": write_id}) from error
            raise

    async def _enqueue(self, input: WriteInput) -> WriteOutput:
        return await self._run(MemoryActivities.write_async, input, QUEUE_TIMEOUT,
                               self._policy(input), f"xmemory write_async: {len(input.text)} chars")

    def _policy(self, input: WriteInput) -> RetryPolicy:
        return self.write_retry_policy or (RETRIED if input.mutations_json else ONCE)

    async def _run(
        self, run: Callable[[MemoryActivities, In], Awaitable[R]], input: In,
        timeout: timedelta, policy: RetryPolicy | None, summary: str, *,
        limit: timedelta | None = None,
    ) -> R:
        return await workflow.execute_activity_method(
            run, input, start_to_close_timeout=timeout, schedule_to_close_timeout=limit,
            heartbeat_timeout=self.heartbeat_timeout, retry_policy=policy, summary=summary)


def memory_for_workflow(
    *,
    read_timeout: timedelta = READ_TIMEOUT,
    write_timeout: timedelta = WRITE_TIMEOUT,
    read_retry_policy: RetryPolicy = RETRIED,
    write_retry_policy: RetryPolicy | None = None,
    heartbeat_timeout: timedelta = HEARTBEAT_TIMEOUT,
) -> WorkflowMemory:
    """The handle for Workflow code. A `write_retry_policy` of your own holds for free text as well:
    give one only if every key stands in the text word for word."""
    return WorkflowMemory(
        read_timeout, write_timeout, read_retry_policy, write_retry_policy, heartbeat_timeout)


def _write_input(
    text: str, *, structured_mutations: Sequence[Mutation] | None = None,
    extraction_logic: str = "deep", scope: Scope | None = None,
) -> WriteInput:
    """Refuses, before anything is scheduled, what the client would refuse."""
    if bool(text.strip()) == (structured_mutations is not None):
        raise _wrong("a write needs either a text or structured_mutations")
    if structured_mutations is None:
        return WriteInput(text, extraction_logic, _json(scope))
    if not structured_mutations:
        raise _wrong("structured_mutations is empty; leave the write out")
    if scope is not None:
        raise _wrong("scope binds a text; a structured mutation carries its own key")
    return WriteInput(mutations_json=_json(list(structured_mutations)))


def _json(value: Any) -> str:
    try:
        return json.dumps(value, sort_keys=True)
    except (TypeError, ValueError):
        raise _wrong("memory takes only what JSON can hold; write dates as text") from None


def _wrong(what: str) -> ApplicationError:
    """Fails the Workflow; any other exception would only retry its Workflow Task for ever."""
    return ApplicationError(what, type=BAD_REQUEST.type, non_retryable=True)
