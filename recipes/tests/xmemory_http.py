"""An HTTP face of FakeXmemory, for the real client. Loopback only, one key, one instance; another
one takes its place when it is made."""

import json
from collections.abc import Mapping
from typing import Any

from http_face import Answer, HttpFace, Request

from fake_xmemory import FakeXmemory, XmemoryAPIError, refused

METHODS = ("read", "write", "write_async", "write_status")
CLIENT_NAMES = {"mode": "read_mode", "use_diff_engine": "diff_engine"}


class XmemoryFace(HttpFace):
    def __init__(self, fake: FakeXmemory, instance_id: str, api_key: str) -> None:
        super().__init__()
        self.fake, self.api_key = fake, api_key
        self.paths = {f"/instances/{instance_id}/{method}": method for method in METHODS}
        self.clusters = [{"id": "cluster-1", "org_id": "org-1", "name": "only"}]
        self.instances: list[dict[str, Any]] = []  # as the client lists them, with their schemas

    async def answer(self, request: Request) -> Answer | None:
        try:
            made = request.method == "POST" and request.path.endswith("/instances")
            return _envelope(201 if made else 200, items=await self._call(request))
        except XmemoryAPIError as error:
            failed = error
        except ValueError as error:  # what the fake refuses as the client would, and it did not
            failed = refused(str(error))
        if failed.status is None and failed.code is None:
            return None
        shown = {"code": failed.code, "message": str(failed), "details": failed.details}
        hint = {} if failed.retry_after is None else {"Retry-After": str(failed.retry_after)}
        return _envelope(failed.status or 500, hint, errors=[shown])

    async def _call(self, request: Request) -> list[Any]:
        if request.headers.get("authorization") != f"Bearer {self.api_key}":
            raise XmemoryAPIError("wrong key", status=401, code="UNAUTHORIZED")
        match request.method, *request.path.partition("?")[0].split("/")[1:]:
            case "GET", "clusters":
                return self.clusters
            case "GET", "instances":
                return self.instances
            case "POST", "clusters", cluster_id, "instances":
                return [self._create(cluster_id, request.body)]
            case "GET" | "PATCH" | "DELETE" as verb, "instances", instance_id, *_:
                return self._one(verb, instance_id, request.body)
        if request.method != "POST" or request.path not in self.paths:
            raise XmemoryAPIError("no such instance", status=404, code="NOT_FOUND")
        options = {CLIENT_NAMES.get(name, name): value for name, value in request.body.items()}
        if scope := options.get("scope"):  # on the wire its keys are nested once more
            flat = [named | {"key": named["key"]["key"]} for named in scope["objects"]]
            options["scope"] = scope | {"objects": flat}
        return [vars(await getattr(self.fake, self.paths[request.path])(**options))]

    def _one(self, verb: str, instance_id: str, change: Any) -> list[Any]:
        found = [each for each in self.instances if each["id"] == instance_id]
        if not found:
            raise XmemoryAPIError("no such instance", status=404, code="NOT_FOUND")
        if verb == "PATCH":
            found[0].update(change)
        elif verb == "DELETE":
            self.instances.remove(found[0])
        return found

    def _create(self, cluster_id: str, wanted: Mapping[str, Any]) -> dict[str, Any]:
        """An empty instance, whose records have the keys that its schema says."""
        schema = json.loads(wanted["instance_schema"]["json_schema"]["value"])
        made = {
            "id": f"made-{len(self.instances) + 1}",
            "cluster_id": cluster_id,
            "name": wanted["name"],
            "data_schema": schema,
        }
        self.instances.append(made)
        keys = {name: each["primary_key"] for name, each in schema["objects"].items()}
        self.fake = FakeXmemory(keys)
        self.paths = {f"/instances/{made['id']}/{method}": method for method in METHODS}
        return made


def _envelope(status: int, headers: Mapping[str, str] = {}, **filled: Any) -> Answer:
    body = {"ids": [], "items": [], "errors": []} | filled
    return Answer(status, json.dumps(body).encode(), headers)
