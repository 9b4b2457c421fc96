"""An in-memory xmemory instance with the call shape of the client's async instance handle.

Its outline is that of `fake_stripe.py`. A write is a job. Jobs wait in one queue and are applied in
the order received. A read sees only completed jobs. There is no idempotency key and no
deduplication: a write that is sent twice is two jobs. A structured mutation carries its key, so two
of the same still end in one row.

The schema is `{object type: [primary key fields]}`. The stand-in for the extractor reads `name:
fact` from a text. With `forks`, every text after the first job loses a leading "Dr.", as a model
may drop it. The same person is then filed under another key. Left out: relations, `xresponse`, the
scope of a write, visibility lag, networking. The clock is `time.time()`, so a frozen clock works.

Source of the rules: xmemory-ai 0.23, its documentation, and recorded answers of the live service.
"""

import asyncio
import copy
import re
import time
from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Row = dict[str, Any]
Key = tuple[tuple[str, Any], ...]
Mutation = Mapping[str, Any]

FACTS = "Person"  # the object type that extracted facts are filed under, keyed by name

# --- Errors and results: the client's names and attributes ---------------------------------------


class XmemoryAPIError(Exception):
    """Branch on `code`. A lost connection has neither `status` nor `code`."""

    def __init__(
        self,
        message: str,
        *,
        status: int | None = None,
        code: str | None = None,
        details: Mapping[str, Any] | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.code = status, code
        self.details, self.retry_after = details, retry_after


def connection_lost() -> XmemoryAPIError:
    return XmemoryAPIError("request failed: connection reset")


def refused(message: str) -> XmemoryAPIError:
    return XmemoryAPIError(message, status=400, code="VALIDATION_ERROR")


@dataclass
class ReadResult:
    reader_result: Any = None
    notice: str | None = None
    trace_id: str | None = None
    reader_results: Sequence[Any] = ()


@dataclass
class WriteResult:
    write_id: str
    trace_id: str | None = None
    changes: Any = None


@dataclass
class WriteStatusResult:
    write_id: str
    write_status: str
    error_detail: str | None = None
    changes: Any = None


@dataclass
class _Job:
    id: str
    mutations: Sequence[Mutation]
    ready_at: float  # when its extraction is done; it then still waits for older jobs
    ended: str = ""  # "completed" or "failed", once it was its turn
    error: XmemoryAPIError | None = None
    changes: Any = None


# --- The instance --------------------------------------------------------------------------------


class FakeXmemory:
    def __init__(self, schema: Mapping[str, Sequence[str]], *, forks: bool = False) -> None:
        self.schema = {FACTS: ["name"], **schema}
        self.tables: dict[str, dict[Key, Row]] = {name: {} for name in self.schema}
        self.forks = forks
        self.job_seconds = 0.0  # how long an extraction takes
        self.paused = False  # while set, no job is applied
        self.calls: list[str] = []
        self._jobs: dict[str, _Job] = {}
        self._queue: deque[_Job] = deque()  # the jobs that wait for their turn
        self._faults: dict[str, list[tuple[XmemoryAPIError, bool]]] = defaultdict(list)

    def put(self, name: str, row: Row) -> None:
        """A record that is there from the start."""
        self.tables[name][_key({field: row[field] for field in self.schema[name]})] = row

    def fail_next(
        self,
        error: XmemoryAPIError,
        *,
        times: int = 1,
        method: str = "read",
        acted: bool = False,
    ) -> None:
        """Answer the next `times` calls of `method` with `error`. With `acted`, queue it first."""
        self._faults[method] += [(error, acted)] * times

    def counts(self) -> Counter[str]:
        """How often each method was called."""
        return Counter(self.calls)

    async def read(
        self,
        query: str,
        *,
        read_mode: str = "single-answer",
        scope: Mapping[str, Any] | None = None,
        read_id: str | None = None,
        timeout: float | None = None,
    ) -> ReadResult:
        """The first object type that the query names is what it asks for."""
        named = scope["objects"] if scope else []
        if read_mode not in ("single-answer", "raw-tables"):
            raise ValueError("this stand-in knows two read modes")
        if not all(each["key"] for each in named):
            raise ValueError("a scope needs a key")
        self._receive("read")
        self.apply_due()
        words = re.sub(r"[^a-z0-9]", "", query.lower())
        wanted = next((name for name in self.schema if name.lower() in words), None)
        if wanted is None:
            return ReadResult()  # the schema cannot hold what was asked for
        table = self.tables[wanted]
        if scope:
            places = [(each["type"], _key(each["key"])) for each in named]
            if not all(key in self.tables.get(name, {}) for name, key in places):
                raise refused("no such record")
            table = {key: table[key] for name, key in places if name == wanted}
        rows = list(table.values())
        if read_mode == "single-answer":
            return ReadResult("; ".join(map(str, rows)))
        names = list(dict.fromkeys(field for row in rows for field in row))
        columns = [{"name": field, "type": "str"} for field in names]
        cells = [[row.get(field) for field in names] for row in rows]
        return ReadResult({"columns": columns, "rows": cells})

    async def write(
        self, text: str = "", *, timeout: float | None = None, **options: Any
    ) -> WriteResult:
        """Returns when its own job is applied, or raises why that was refused."""
        job = self._submit("write", text, **options)
        while not job.ended:
            await asyncio.sleep(0.02)
            self.apply_due()
        if job.error is not None:
            raise job.error
        return WriteResult(job.id, changes=job.changes)

    async def write_async(
        self, text: str = "", *, timeout: float | None = None, **options: Any
    ) -> WriteResult:
        """Returns once queued. `write_status` knows its id at once."""
        return WriteResult(self._submit("write_async", text, **options).id)

    async def write_status(
        self, write_id: str, *, timeout: float | None = None
    ) -> WriteStatusResult:
        self._receive("write_status")
        self.apply_due()
        job = self._jobs.get(write_id)
        if job is None:
            return WriteStatusResult(write_id, "not_found")
        status = job.ended or ("extracted" if time.time() >= job.ready_at else "extracting")
        detail = None if job.error is None else str(job.error)
        return WriteStatusResult(write_id, status, detail, job.changes)

    # --- the queue -------------------------------------------------------------------------------

    def _receive(self, method: str) -> XmemoryAPIError | None:
        """Count the call. A scripted fault is raised, or returned if the call acts before it."""
        self.calls.append(method)
        if not self._faults[method]:
            return None
        error, acted = self._faults[method].pop(0)
        if not acted:
            raise error
        return error

    def _submit(
        self,
        method: str,
        text: str,
        *,
        structured_mutations: Sequence[Mutation] | None = None,
        extraction_logic: str = "fast",
        diff_engine: bool | None = None,
    ) -> _Job:
        if bool(text) == (structured_mutations is not None):
            raise ValueError("give exactly one of text and structured_mutations")
        if structured_mutations is not None and not structured_mutations:
            raise ValueError("structured_mutations must not be empty")
        if extraction_logic not in ("fast", "deep"):
            raise ValueError("extraction_logic is fast or deep")
        for mutation in structured_mutations or ():
            operation = mutation["object_mutation"].keys() - {"object_type"}
            if operation not in ({"create"}, {"update"}, {"delete"}):
                raise ValueError("a mutation has exactly one of create, update and delete")
        lost = self._receive(method)
        mutations = copy.deepcopy(structured_mutations or self._extract(text))
        job = _Job(f"w{len(self._jobs) + 1:05d}", mutations, time.time() + self.job_seconds)
        self._jobs[job.id] = job
        self._queue.append(job)
        self.apply_due()
        if lost is not None:
            raise lost
        return job

    def _extract(self, text: str) -> list[Mutation]:
        """One fact from `name: fact`. Any other text holds nothing that is worth a row."""
        name, colon, fact = text.partition(": ")
        if self.forks and self._jobs:
            name = name.removeprefix("Dr. ")
        change = {"key": {"name": name}, "values": {"fact": fact}}
        # "merge" creates or updates. Only an extraction can do that; `_submit` refuses it.
        return [{"object_mutation": {"object_type": FACTS, "merge": change}}] if colon else []

    def apply_due(self) -> None:
        """Apply, in the order received, every job whose time has come."""
        while self._queue and not self.paused and time.time() >= self._queue[0].ready_at:
            job = self._queue.popleft()
            try:
                self._apply(job)
                job.ended = "completed"
            except XmemoryAPIError as error:
                job.ended, job.error = "failed", error

    def _apply(self, job: _Job) -> None:
        """All mutations of a job, or none: they are staged first. A row of None is deleted."""
        staged: dict[tuple[str, Key], Row | None] = {}
        changes: Row = {word: {"objects": []} for word in ("created", "updated", "deleted")}
        for mutation in job.mutations:
            wanted = dict(mutation["object_mutation"])
            name = wanted.pop("object_type", None)
            ((operation, change),) = wanted.items()
            if name not in self.schema or change.get("key", {}).keys() != set(self.schema[name]):
                raise refused(f"no object type {name} with this primary key")
            place = name, _key(change["key"])
            row = staged[place] if place in staged else self.tables[name].get(place[1])
            if operation == "create" and row is not None:
                raise XmemoryAPIError(f"this {name} exists already", status=409, code="CONFLICT")
            if operation in ("update", "delete") and row is None:
                raise refused(f"no {name} with this key")
            values = {**(row or change["key"]), **change.get("values", {})}
            kept = {field: value for field, value in values.items() if value is not None}
            staged[place] = None if operation == "delete" else kept
            done = "updated" if row else "created"
            changes["deleted" if operation == "delete" else done]["objects"].append({"name": name})
        for (name, key), row in staged.items():
            if row is None:
                self.tables[name].pop(key, None)
            else:
                self.tables[name][key] = row
        job.changes = changes


def _key(fields: Mapping[str, Any]) -> Key:
    return tuple(sorted(fields.items()))
