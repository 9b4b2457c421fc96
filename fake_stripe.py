"""An in-memory Stripe with the call shape of `stripe.StripeClient`: refunds and payment intents.

The one rule: never more generous than Stripe. The refunds of a charge never exceed it, a key given
twice moves money once, and a call without a key is a new request every time.

Copied from the v1 API: the idempotency layer (order of checks, what is stored, what a replay looks
like), the life of a refund, error classes with their attributes. Left out: everything else, also
networking: whoever wants the ledger to outlive a killed process keeps this object in another one.
The clock is `time.time()`, so a frozen clock is obeyed. Faults are driven from outside, with
`fail_next`, `hold_next_create`, `settle` and the public attributes.

Source of the rules: Stripe's API reference (idempotent requests, errors, refunds), stripe-python 16
"""

import asyncio
import copy
import itertools
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple, NoReturn

KEY_RETENTION_SECONDS = 24 * 60 * 60  # Stripe may prune a key after this; a pruned key runs as new
MAX_KEY_LENGTH = 255
DEFAULT_PAGE, MAX_PAGE = 10, 100  # objects in one answer of a list call
REFUND_PARAMS = {"payment_intent", "charge", "amount", "reason", "metadata", "expand"}
LIST_PARAMS = {"payment_intent", "charge", "limit", "starting_after"}
REASONS = {"duplicate", "fraudulent", "requested_by_customer"}
DEAD = {"failed", "canceled"}  # refunds that do not count against what is left of the charge
IN_FRONT = {None, 401, 403, 409, 429}  # answered before the idempotency layer: nothing is stored

Params = Mapping[str, Any]
Record = dict[str, Any]
Effect = Callable[[], Record]

# --- Errors: the SDK's class names and attributes ------------------------------------------------


class StripeError(Exception):
    """Branch on `http_status` and `error.code`. `code` itself is None on most classes even when
    `error.code` is set: that is the SDK's habit, kept here."""

    def __init__(self, message: str, http_status: int | None = None, type: str = "api_error",
                 code: str | None = None, param: str | None = None, *,
                 should_retry: bool = False, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.user_message, self.http_status, self.should_retry = message, http_status, should_retry
        self.error = SimpleNamespace(type=type, code=code, param=param, message=message)
        self.code: str | None = None
        self.param: str | None = None
        self.headers = dict(headers or {})
        self.request_id: str | None = None


class APIError(StripeError): ...
class APIConnectionError(StripeError): ...
class AuthenticationError(StripeError): ...
class PermissionError(StripeError): ...
class RateLimitError(StripeError): ...
class IdempotencyError(StripeError): ...


class InvalidRequestError(StripeError):
    def __init__(self, message: str, http_status: int = 400, type: str = "invalid_request_error",
                 code: str | None = None, param: str | None = None, **more: Any) -> None:
        super().__init__(message, http_status, type, code, param, **more)
        self.code, self.param = code, param


def rate_limited() -> StripeError:
    return RateLimitError("Too many requests.", 429, "invalid_request_error", "rate_limit")


def server_error() -> StripeError:
    return APIError("An unknown error occurred.", 500, headers={"Stripe-Should-Retry": "false"})


def connection_lost() -> StripeError:
    return APIConnectionError("Could not communicate with Stripe.", None, should_retry=True)


def not_permitted() -> StripeError:
    return PermissionError("This key does not have the required permissions for this endpoint.",
                           403, "invalid_request_error")


# --- What is kept --------------------------------------------------------------------------------


class Call(NamedTuple):
    """One line of the call ledger. `endpoint` is `refunds.create`, `payment_intents.retrieve`, …"""

    endpoint: str
    idempotency_key: str | None


@dataclass
class _Stored:
    """What a key is bound to. `outcome` is None while the first request is still running."""

    path: str
    params: Record
    at: float
    request_id: str
    outcome: Record | StripeError | None = None


class _Fault(NamedTuple):
    error: StripeError
    acted: bool


# --- The service ---------------------------------------------------------------------------------


class FakeStripe:
    """Stands for an account, and for a client of it that uses `api_key`.

    Only keys that start with `sk_test_` or `rk_test_` are accepted. That is the fake's own rule, so
    that a live key that strays in here is refused at the first call.
    """

    def __init__(self, api_key: str | None = "sk_test_fake") -> None:
        self.api_key = api_key
        self.payments: dict[str, Record] = {}
        self.charges: dict[str, Record] = {}
        self.refunds: dict[str, Record] = {}
        self.calls: list[Call] = []
        self.next_statuses: list[str] = []  # of the next refunds; then "succeeded"
        self.answer_delay_seconds = 0.0  # between acting on a create and answering it
        self._keys: dict[str, _Stored] = {}
        self._faults: dict[str, list[_Fault]] = defaultdict(list)
        self._hold, self._held, self._released = "", asyncio.Event(), asyncio.Event()
        self._ids = itertools.count(1)
        self.v1 = SimpleNamespace(refunds=_Refunds(self), payment_intents=_PaymentIntents(self))

    def add_payment(self, amount: int, currency: str, *, status: str = "succeeded",
                    refunded: int = 0) -> str:
        """Put a card payment of `amount` minor units on the books; the id of its payment intent."""
        paid, charge_id, id = status == "succeeded", self.new_id("ch"), self.new_id("pi")
        common = {"amount": amount, "currency": currency, "created": int(time.time())}
        charge = common | {
            "id": charge_id, "object": "charge", "amount_captured": amount, "amount_refunded": 0,
            "refunded": False, "disputed": False, "status": "succeeded", "payment_intent": id}
        self.payments[id] = common | {
            "id": id, "object": "payment_intent", "amount_received": amount if paid else 0,
            "amount_capturable": 0, "status": status, "latest_charge": charge_id if paid else None,
            "metadata": {}, "livemode": False}
        self.charges[charge_id] = charge
        if refunded:
            self.refund(charge, refunded, {}, None)
        return id

    def settle(self, refund_id: str, status: str, failure_reason: str = "unknown") -> None:
        """Let a refund move on, as banks do later: pending to succeeded, succeeded to failed."""
        refund = self.refunds[refund_id]
        if refund["status"] in DEAD:
            raise ValueError("a refund that failed or was canceled stays so")
        refund["status"] = status
        refund.pop("pending_reason", None)
        if status in DEAD:
            refund |= {"failure_reason": failure_reason,
                       "failure_balance_transaction": self.new_id("txn")}
        self._recount(self.charges[refund["charge"]])

    def fail_next(self, error: StripeError, *, times: int = 1, endpoint: str = "refunds.create",
                  acted: bool = False) -> None:
        """Answer the next `times` calls of `endpoint` with `error`. With `acted` the request is
        carried out first: an answer that gets lost, or a 500 after the effect."""
        self._faults[endpoint] += [_Fault(error, acted)] * times

    def hold_next_create(self, where: str) -> asyncio.Event:
        """Stop the next create `before` Stripe acts, or `after` that but before it answers, until
        `release` is called. The event says that it is held."""
        self._hold, self._held = where, asyncio.Event()
        self._released.clear()
        return self._held

    def release(self) -> None:
        self._released.set()

    def counts(self) -> Counter[str]:
        """How often each endpoint was called."""
        return Counter(call.endpoint for call in self.calls)

    # --- one request, in Stripe's order of checks ------------------------------------------------

    async def post(self, endpoint: str, path: str, params: Params, options: Params | None,
                   check: Callable[[], Effect]) -> SimpleNamespace:
        """`check` validates and returns the effect. Its own refusals are not stored, the effect's
        are."""
        key = (options or {}).get("idempotency_key") or None
        with self.received(endpoint, key) as request_id:
            fault = self.take_fault(endpoint)
            in_front = fault and fault.error.http_status in IN_FRONT
            if fault and in_front and not fault.acted:
                raise copy.copy(fault.error)
            headers = {}
            if stored := self._known(key, path, params):
                headers = {"Idempotent-Replayed": "true"}
            else:
                effect = check()
                stored = _Stored(path, copy.deepcopy(dict(params)), time.time(), request_id)
                await self._act(stored, key, effect, fault)
            if fault and in_front:
                raise copy.copy(fault.error)
            return self._answer(stored, request_id, key, headers)

    async def _act(self, stored: _Stored, key: str | None, effect: Effect,
                   fault: _Fault | None) -> None:
        if key is not None:
            self._keys[key] = stored
        try:
            await self._pause("before")
            stored.outcome = self._outcome(effect, fault)
        finally:
            if stored.outcome is None:  # canceled before it acted: as if it had never come
                self._keys.pop(key or "", None)
        await asyncio.sleep(self.answer_delay_seconds)
        await self._pause("after")

    @contextmanager
    def received(self, endpoint: str, key: str | None = None) -> Iterator[str]:
        """Count the call, check the API key, and give the request its id, also on a refusal."""
        self.calls.append(Call(endpoint, key))
        request_id = self.new_id("req")
        try:
            self._authenticate()
            yield request_id
        except StripeError as error:
            if error.http_status is not None and error.request_id is None:
                error.request_id = error.headers["Request-Id"] = request_id
            raise

    def _authenticate(self) -> None:
        if not (self.api_key or "").startswith(("sk_test_", "rk_test_")):
            raise AuthenticationError("The Stripe stand-in takes only sk_test_... and rk_test_... "
                                      "keys.", 401, "invalid_request_error")

    def take_fault(self, endpoint: str) -> _Fault | None:
        return self._faults[endpoint].pop(0) if self._faults[endpoint] else None

    def _known(self, key: str | None, path: str, params: Params) -> _Stored | None:
        if key is not None and len(key) > MAX_KEY_LENGTH:
            raise InvalidRequestError("An idempotency key has 255 characters at most.")
        stored = self._keys.get(key or "")
        if stored is None or time.time() - stored.at >= KEY_RETENTION_SECONDS:
            return None
        if stored.outcome is None:
            raise APIError("Another request with this idempotency key is in progress.",
                           409, "invalid_request_error", "idempotency_key_in_use")
        if (stored.path, stored.params) != (path, dict(params)):
            raise IdempotencyError("This idempotency key was first used with another endpoint or "
                                   "with other parameters.", 400, "idempotency_error")
        return stored

    def _outcome(self, effect: Effect, fault: _Fault | None) -> Record | StripeError:
        if fault and not fault.acted:
            return fault.error
        try:
            record = copy.deepcopy(effect())  # a replay does not show later changes
        except InvalidRequestError as refused:
            return refused
        return fault.error if fault and fault.error.http_status not in IN_FRONT else record

    def _answer(self, stored: _Stored, request_id: str, key: str | None,
                headers: dict[str, str]) -> SimpleNamespace:
        headers |= {"Request-Id": request_id}
        if key is not None:
            headers |= {"Idempotency-Key": key, "Original-Request": stored.request_id}
        if isinstance(stored.outcome, StripeError):
            error = copy.copy(stored.outcome)
            error.headers, error.request_id = error.headers | headers, request_id
            raise error
        return stripe_object(stored.outcome or {}, headers)

    async def _pause(self, where: str) -> None:
        if self._hold == where:
            self._hold = ""
            self._held.set()
            await self._released.wait()

    # --- the effect ------------------------------------------------------------------------------

    def refund(self, charge: Record | None, amount: int | None, metadata: Params,
               reason: str | None) -> Record:
        if charge is None:
            raise InvalidRequestError("This payment has no successful charge to refund.")
        left = self._left(charge)
        if left == 0:
            raise InvalidRequestError("This charge was refunded.", code="charge_already_refunded")
        if charge["disputed"]:
            raise InvalidRequestError("This charge was charged back.", code="charge_disputed")
        if amount is not None and amount > left:
            raise InvalidRequestError(f"{amount} is more than is left ({left}).", param="amount")
        status = self.next_statuses.pop(0) if self.next_statuses else "succeeded"
        refund: Record = {
            "id": self.new_id("re"), "object": "refund", "amount": amount or left, "status": status,
            "currency": charge["currency"], "charge": charge["id"], "reason": reason,
            "payment_intent": charge["payment_intent"], "metadata": dict(metadata),
            "created": int(time.time()), "balance_transaction": self.new_id("txn")}
        if status == "pending":
            refund["pending_reason"] = "processing"
        self.refunds[refund["id"]] = refund
        if status in DEAD:
            refund["status"] = "pending"
            self.settle(refund["id"], status)
        self._recount(charge)
        return refund

    def _left(self, charge: Record) -> int:
        mine = [r for r in self.refunds.values() if r["charge"] == charge["id"]]
        left: int = charge["amount"] - sum(r["amount"] for r in mine if r["status"] not in DEAD)
        return left

    def _recount(self, charge: Record) -> None:
        mine = [r for r in self.refunds.values() if r["charge"] == charge["id"]]
        done = sum(refund["amount"] for refund in mine if refund["status"] == "succeeded")
        charge |= {"amount_refunded": done, "refunded": done == charge["amount"]}

    def new_id(self, prefix: str) -> str:
        return f"{prefix}_{next(self._ids):06d}"


class _Refunds:
    def __init__(self, stripe: FakeStripe) -> None:
        self._stripe = stripe

    async def create_async(self, params: Params, options: Params | None = None) -> SimpleNamespace:
        stripe = self._stripe

        def check() -> Effect:
            charge, (amount, reason) = self._charge(params), _checked(params)
            return lambda: stripe.refund(charge, amount, params.get("metadata", {}), reason)

        return await stripe.post("refunds.create", "/v1/refunds", params, options, check)

    async def cancel_async(self, refund: str, params: Params | None = None,
                           options: Params | None = None) -> SimpleNamespace:
        stripe = self._stripe

        def cancel() -> Record:
            if stripe.refunds[refund]["status"] not in ("pending", "requires_action"):
                raise InvalidRequestError("Only a refund that was not sent yet can be canceled.")
            stripe.settle(refund, "canceled", "merchant_request")
            return stripe.refunds[refund]

        def check() -> Effect:
            return cancel if refund in stripe.refunds else _missing("refund", "id")

        path = f"/v1/refunds/{refund}/cancel"
        return await stripe.post("refunds.cancel", path, params or {}, options, check)

    async def retrieve_async(self, refund: str, params: Params | None = None,
                             options: Params | None = None) -> SimpleNamespace:
        with _get(self._stripe, "refunds.retrieve") as headers:
            if refund not in self._stripe.refunds:
                _missing("refund", "id")
            return stripe_object(self._stripe.refunds[refund], headers)

    async def list_async(self, params: Params | None = None,
                         options: Params | None = None) -> SimpleNamespace:
        """Newest first, a page at a time."""
        wanted = dict(params or {})
        limit = min(int(wanted.pop("limit", DEFAULT_PAGE)), MAX_PAGE)
        after = wanted.pop("starting_after", None)
        with _get(self._stripe, "refunds.list") as headers:
            _only(LIST_PARAMS, wanted)
            newest_first = list(reversed(self._stripe.refunds.values()))
            found = [r for r in newest_first if all(r[name] == wanted[name] for name in wanted)]
            ids = [r["id"] for r in found]
            if after and after not in ids:
                _missing("refund", "starting_after")
            start = ids.index(after) + 1 if after else 0
            page = {"object": "list", "url": "/v1/refunds", "data": found[start:start + limit]}
            return stripe_object(page | {"has_more": len(found) > start + limit}, headers)

    def _charge(self, params: Params) -> Record | None:
        """The charge to refund, None if the payment has no successful one; or a refusal."""
        stripe, intent, charge = self._stripe, params.get("payment_intent"), params.get("charge")
        _only(REFUND_PARAMS, params)
        if intent is None and charge is None:
            raise InvalidRequestError("Give a payment_intent or a charge.")
        if intent is not None:
            if intent not in stripe.payments:
                _missing("payment_intent", "payment_intent")
            charge = stripe.payments[intent]["latest_charge"]
        elif charge not in stripe.charges:
            _missing("charge", "charge")
        return stripe.charges[charge] if charge else None


class _PaymentIntents:
    def __init__(self, stripe: FakeStripe) -> None:
        self._stripe = stripe

    async def retrieve_async(self, intent: str, params: Params | None = None,
                             options: Params | None = None) -> SimpleNamespace:
        with _get(self._stripe, "payment_intents.retrieve") as headers:
            if intent not in self._stripe.payments:
                _missing("payment_intent", "intent")
            record = dict(self._stripe.payments[intent])
            if "latest_charge" in (params or {}).get("expand", ()) and record["latest_charge"]:
                record["latest_charge"] = self._stripe.charges[record["latest_charge"]]
            return stripe_object(record, headers)


# --- Small parts ---------------------------------------------------------------------------------


@contextmanager
def _get(stripe: FakeStripe, endpoint: str) -> Iterator[dict[str, str]]:
    """A read: counted and authenticated, never stored; a key given with it means nothing."""
    with stripe.received(endpoint) as request_id:
        if fault := stripe.take_fault(endpoint):
            raise copy.copy(fault.error)
        yield {"Request-Id": request_id}


def _checked(params: Params) -> tuple[int | None, str | None]:
    amount, reason = params.get("amount"), params.get("reason")
    if amount is not None and (type(amount) is not int or amount < 1):
        raise InvalidRequestError(f"Invalid integer: {amount}", code="parameter_invalid_integer",
                                  param="amount")
    if reason is not None and reason not in REASONS:
        raise InvalidRequestError(f"Use one of {', '.join(sorted(REASONS))}", param="reason")
    return amount, reason


def _only(known: set[str], params: Params) -> None:
    for name in params.keys() - known:
        raise InvalidRequestError(f"Unknown parameter: {name}", code="parameter_unknown",
                                  param=name)


def _missing(what: str, param: str) -> NoReturn:
    raise InvalidRequestError(f"No such {what}.", 404, code="resource_missing", param=param)


def stripe_object(record: Record, headers: Mapping[str, str]) -> SimpleNamespace:
    """A record as the SDK hands it out: attributes, a copy, and `last_response`."""
    last_response = SimpleNamespace(
        code=200, headers=dict(headers), request_id=headers.get("Request-Id"),
        idempotency_key=headers.get("Idempotency-Key"))
    return SimpleNamespace(last_response=last_response,
                           **{name: _attributes(value) for name, value in record.items()})


def _attributes(value: Any) -> Any:
    if isinstance(value, Mapping):
        return SimpleNamespace(**{name: _attributes(inner) for name, inner in value.items()})
    return [_attributes(inner) for inner in value] if isinstance(value, list) else value
