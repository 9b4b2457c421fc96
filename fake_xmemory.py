"""An in-memory xmemory instance with the call shape of the client's async instance handle.

The same outline as `fake_stripe.py`. The rule here: a write is a job. It waits its turn in one
queue, in the order received, and only a completed job can be read. There is no idempotency key and
no deduplication: a write sent twice is two jobs, and only a structured mutation, which carries its
key, then still ends in one row.

The schema is `{object type: [primary key fields]}`. The stand-in for the extractor reads `name:
fact` from a text; with `forks` on, its second and later passes drop a title from the name, as a
model may, and so file the same person under another key. Left out: relations, related types,
visibility lag, networking. The clock is `time.time()`: a job takes `job_seconds` by it, so a frozen
clock is obeyed.

Source of the rules: xmemory-ai 0.23, its documentation, and recorded answers of the live service.
"""

import asyncio
import copy
import itertools
import re
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

Row = dict[str, Any]
Key = tuple[tuple[str, Any], ...]
Mutation = Mapping[str, Any]
Scope = Mapping[str, Any]

READ_MODES = ("single-answer", "raw-tables", "xresponse")
LOGICS = ("fast", "deep")
OPERATIONS = {"create": "created", "update": "updated", "delete": "deleted"}
ENDED = ("completed", "failed")
TITLES = re.compile(r"^(Dr|Mr|Mrs|Ms|Prof)\.?\s+", re.IGNORECASE)
FACTS = "Person"  # the object type that extracted facts are filed under, keyed by name
POLL_SECONDS = 0.02  # how often a synchronous write looks whether its turn has come
TRACE = "trace-1"

# --- Errors and results: the client's names and attributes ---------------------------------------


class XmemoryAPIError(Exception):
    """Branch on `code`. A lost connection has neither `status` nor `code`."""

    def __init__(self, message: str, *, status: int | None = None, code: str | None = None,
                 details: Mapping[str, Any] | None = None, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.status, self.code = status, code
        self.details, self.retry_after = details, retry_after


class ValidationError(ValueError):
    """What the client itself refuses, before or after it asked (there: pydantic's error)."""


def connection_lost() -> XmemoryAPIError:
    return XmemoryAPIError("request failed: connection reset")


def refused(message: str) -> XmemoryAPIError:
    return XmemoryAPIError(message, status=400, code="VALIDATION_ERROR")


@dataclass
class ReadResult:
    reader_result: Any = None
    notice: str | None = None
    trace_id: str | None = TRACE
    console_url: str | None = None
    related_types: Any = None
    reader_results: Sequence[Any] = ()


@dataclass
class AsyncWriteResult:
    write_id: str
    trace_id: str | None = TRACE
    console_url: str | None = None


@dataclass
class WriteResult(AsyncWriteResult):
    changes: Any = None


@dataclass
class WriteStatusResult:
    write_id: str
    write_status: str
    error_detail: str | None = None
    completed_at: datetime | None = None
    changes: Any = None
    console_url: str | None = None


@dataclass
class _Job:
    id: str
    fact: tuple[str, str] | None  # what was extracted from the text, if it was a text
    mutations: Sequence[Mutation] | None
    scope: Scope | None  # of a text: what it may touch
    started_at: float
    ready_at: float  # when its extraction is done; it then still waits for older jobs
    status: str = "queued"
    error: XmemoryAPIError | None = None
    changes: Any = None
    completed_at: datetime | None = None


# --- The instance --------------------------------------------------------------------------------


class FakeXmemory:
    def __init__(self, schema: Mapping[str, Sequence[str]], *, forks: bool = False) -> None:
        self.schema = {FACTS: ["name"]} | {name: list(key) for name, key in schema.items()}
        self.tables: dict[str, dict[Key, Row]] = {name: {} for name in self.schema}
        self.forks = forks
        self.job_seconds = 0.0  # how long an extraction takes
        self.paused = False  # while set, no job is applied
        self.shown_status = ""  # what write_status says instead of the truth, unless empty
        self.calls: list[str] = []
        self._jobs: dict[str, _Job] = {}
        self._passes = itertools.count()
        self._faults: dict[str, list[tuple[XmemoryAPIError, bool]]] = defaultdict(list)

    def put(self, name: str, row: Row) -> None:
        """A record that is there from the start."""
        self.tables[name][tuple((field, row[field]) for field in sorted(self.schema[name]))] = row

    def fail_next(self, error: XmemoryAPIError, *, times: int = 1, method: str = "read",
                  acted: bool = False) -> None:
        """Answer the next `times` calls of `method` with `error`; with `acted`, queue it first."""
        self._faults[method] += [(error, acted)] * times

    def counts(self) -> Counter[str]:
        """How often each method was called."""
        return Counter(self.calls)

    async def read(self, query: str, *, read_mode: str = "single-answer",
                   scope: Scope | None = None, include_related_types: str | None = None,
                   related_types_depth: int | None = None, read_id: str | None = None,
                   timeout: float | None = None) -> ReadResult:
        """The first object type that the query names is what it asks for."""
        if read_mode not in READ_MODES:
            raise ValidationError(f"read_mode is one of {', '.join(READ_MODES)}")
        _check_scope(scope)
        self._receive("read")
        self.apply_due()
        words = re.sub(r"[^a-z0-9]", "", query.lower())
        wanted = next((name for name in self.schema if name.lower() in words), None)
        covered = self._covered(scope)
        if wanted is None:
            return ReadResult()  # the schema cannot hold what was asked for
        rows = [row for row in self.tables[wanted].values() if scope is None or row in covered]
        return ReadResult(_answer(wanted, rows, read_mode))

    async def write(self, text: str = "", *, structured_mutations: Sequence[Mutation] | None = None,
                    extraction_logic: str = "fast", diff_engine: bool | None = None,
                    scope: Scope | None = None, timeout: float | None = None) -> WriteResult:
        """Returns when its own job is applied, or raises why that was refused."""
        job = self._submit("write", text, structured_mutations, extraction_logic, scope)
        while job.status not in ENDED:
            await asyncio.sleep(POLL_SECONDS)
            self.apply_due()
        if job.error is not None:
            raise copy.copy(job.error)
        return WriteResult(job.id, changes=job.changes)

    async def write_async(self, text: str = "", *,
                          structured_mutations: Sequence[Mutation] | None = None,
                          extraction_logic: str = "fast", diff_engine: bool | None = None,
                          scope: Scope | None = None,
                          timeout: float | None = None) -> AsyncWriteResult:
        """Returns once queued; its id can be asked for at once."""
        job = self._submit("write_async", text, structured_mutations, extraction_logic, scope)
        return AsyncWriteResult(job.id)

    async def write_status(self, write_id: str, *,
                           timeout: float | None = None) -> WriteStatusResult:
        self._receive("write_status")
        self.apply_due()
        job = self._jobs.get(write_id)
        if job is None:
            return WriteStatusResult(write_id, "not_found")
        detail = None if job.error is None else str(job.error)
        return WriteStatusResult(write_id, self.shown_status or job.status, detail,
                                 job.completed_at, job.changes)

    # --- the queue -------------------------------------------------------------------------------

    def _receive(self, method: str) -> XmemoryAPIError | None:
        """Count the call. A scripted fault is raised, or returned if the call acts before it."""
        self.calls.append(method)
        if not self._faults[method]:
            return None
        error, acted = self._faults[method].pop(0)
        if not acted:
            raise copy.copy(error)
        return copy.copy(error)

    def _submit(self, method: str, text: str, mutations: Sequence[Mutation] | None, logic: str,
                scope: Scope | None) -> _Job:
        if bool(text) == (mutations is not None):
            raise ValueError("give exactly one of text and structured_mutations")
        if mutations is not None and not mutations:
            raise ValueError("structured_mutations must not be empty")
        if mutations is not None and scope is not None:
            raise ValueError("scope cannot be combined with structured_mutations")
        if logic not in LOGICS:
            raise ValidationError(f"extraction_logic is one of {', '.join(LOGICS)}")
        for mutation in mutations or ():
            _operation(mutation)
        _check_scope(scope)
        lost, now = self._receive(method), time.time()
        job = _Job(f"w{len(self._jobs) + 1:05d}", self._extract(text), copy.deepcopy(mutations),
                   scope, now, now + self.job_seconds)
        self._jobs[job.id] = job
        self.apply_due()
        if lost is not None:
            raise lost
        return job

    def apply_due(self) -> None:
        """Apply, in the order received, every job whose time has come."""
        now, waiting = time.time(), self.paused
        for job in self._jobs.values():
            if job.status in ENDED:
                continue
            if now >= job.ready_at and not waiting:
                self._apply(job)
                continue
            waiting = True
            extracting = "extracting" if now > job.started_at else "queued"
            job.status = "extracted" if now >= job.ready_at else extracting

    def _apply(self, job: _Job) -> None:
        """All mutations of a job, or none of them."""
        tables = copy.deepcopy(self.tables)
        changes: Row = {done: {"objects": [], "relations": []} for done in OPERATIONS.values()}
        try:
            for mutation in job.mutations or self._as_mutations(job.fact):
                operation, wanted = _operation(mutation)
                changed = {"name": wanted["object_type"], "fields": wanted[operation].get("values")}
                if job.scope and not self._in_scope(job.scope, operation, wanted):
                    changes.setdefault("skipped_out_of_scope", []).append(changed)
                    continue
                self._change(tables, operation, wanted)
                changes[OPERATIONS[operation]]["objects"].append(changed)
        except XmemoryAPIError as error:
            job.status, job.error = "failed", error
            return
        self.tables, job.changes, job.status = tables, changes, "completed"
        job.completed_at = datetime.fromtimestamp(time.time(), UTC)

    def _change(self, tables: dict[str, dict[Key, Row]], operation: str, wanted: Row) -> None:
        name, change = wanted["object_type"], wanted[operation]
        if name not in self.schema or set(change.get("key", ())) != set(self.schema[name]):
            raise refused(f"no object type {name} with this primary key")
        table, key = tables[name], tuple(sorted(change["key"].items()))
        if operation == "create" and key in table:
            raise XmemoryAPIError(f"this {name} exists already", status=409, code="CONFLICT")
        if operation != "create" and key not in table:
            raise refused(f"no {name} with this key")
        if operation == "delete":
            del table[key]
            return
        values = table.get(key, dict(change["key"])) | dict(change.get("values", {}))
        table[key] = {field: value for field, value in values.items() if value is not None}

    def _extract(self, text: str) -> tuple[str, str] | None:
        """One fact from `name: fact`; any other text holds nothing that is worth a row."""
        name, colon, fact = (part.strip() for part in text.partition(":"))
        if not colon:
            return None
        forked = self.forks and next(self._passes) > 0
        return TITLES.sub("", name) if forked else name, fact

    def _as_mutations(self, fact: tuple[str, str] | None) -> list[Mutation]:
        """A fact about a known name updates its row, at the time it is applied."""
        if fact is None:
            return []
        operation = "update" if (("name", fact[0]),) in self.tables[FACTS] else "create"
        change = {"key": {"name": fact[0]}, "values": {"fact": fact[1]}}
        return [{"object_mutation": {"object_type": FACTS, operation: change}}]

    def _in_scope(self, scope: Scope, operation: str, wanted: Row) -> bool:
        """Whether a text that is bound to a scope may make this change. A scope that drops lets
        only its own records be made; one that rejects fails the write, but lets new ones be."""
        wants = (wanted["object_type"], wanted[operation]["key"])
        named = any((each["type"], each["key"]) == wants for each in scope["objects"])
        if scope.get("mode") == "drop":
            return named
        self._covered(scope)  # its records must be there
        if not named and operation != "create":
            raise refused("this write would touch a record outside its scope")
        return True

    def _covered(self, scope: Scope | None) -> list[Row]:
        """The records that a scope names, and no others."""
        covered: list[Row] = []
        for named in scope["objects"] if scope else ():
            row = self.tables.get(named["type"], {}).get(tuple(sorted(named["key"].items())))
            if row is None:
                raise refused(f"no {named['type']} with this key")
            covered.append(row)
        return covered


# --- Small parts ---------------------------------------------------------------------------------


def _check_scope(scope: Scope | None) -> None:
    """As the client takes it; on the wire it nests the key once more."""
    for named in scope["objects"] if scope else ():
        key = named["key"]
        if not key or not all(isinstance(v, str | int | float) for v in key.values()):
            raise ValidationError("a scope needs a key: {field: value}")


def _operation(mutation: Mutation) -> tuple[str, Row]:
    wanted = mutation.get("object_mutation")
    if wanted is None:
        raise ValidationError("only object mutations: this stand-in has no relations")
    names = [name for name in OPERATIONS if name in wanted]
    if len(names) != 1:
        raise ValidationError("a mutation has exactly one of create, update and delete")
    return names[0], wanted


def _answer(name: str, rows: list[Row], read_mode: str) -> Any:
    if read_mode == "single-answer":
        return "; ".join(", ".join(f"{k} {v}" for k, v in row.items()) for row in rows)
    if read_mode == "xresponse":
        return {"objects": [_xobject(name, row) for row in rows], "relations": []}
    names = list(dict.fromkeys(field for row in rows for field in row))
    columns = [{"name": field, "type": "str"} for field in names]
    return {"columns": columns, "rows": [[row.get(field) for field in names] for row in rows]}


def _xobject(name: str, row: Row) -> Row:
    kinds = {bool: "boolean_value", int: "integer_value", float: "float_value"}
    fields = [{"name": k, "value": {kinds.get(type(v), "string_value"): v}} for k, v in row.items()]
    return {"name": name, "identifier": "/".join(map(str, row.values())), "fields": fields}
