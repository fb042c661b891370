"""etcd's JSON gateway (version 3), as far as a job's store needs it: keys, leases, transactions.

One request at a time, to whichever of the members answers. What etcd refuses, and that nobody
answers, are errors of their own: the first is final, the second may pass.
"""

from __future__ import annotations

import base64
import http.client
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tutti.errors import TuttiError

_LIMIT_S = 1.0  # of one request
_PASSING = (4, 8, 14)  # codes of gRPC: deadline exceeded, resource exhausted, unavailable
_PASSING_STATUS = (429, 503, 504)  # the same, as HTTP
_FULL = "space exceeded"  # exhausted as well, and stays so


class StoreAwayError(TuttiError):
    """No member of the store answers."""


class StoreRefusedError(TuttiError):
    """The store answers, and will not do it."""


class Pair(NamedTuple):
    """A key, its value, and when it was made."""

    key: str
    value: str
    made: int  # revision


class Etcd:
    """A client; its methods are called by one thread at a time."""

    def __init__(self, members: Sequence[tuple[str, int]], *, limit_s: float = _LIMIT_S) -> None:
        self._members, self._limit_s = list(members), limit_s

    def read(self, key: str, *, below: bool = False, last: bool = False) -> list[Pair]:
        """Return a key, or all `below` that begin with it (the `last` of them), in order."""
        body: dict[str, Any] = {"key": _coded(key)}
        if below:
            body |= {"range_end": _coded(_after(key)), "sort_target": "KEY"}
        if last:
            body |= {"sort_order": "DESCEND", "limit": "1"}
        return [_pair(entry) for entry in self._ask("kv/range", body).get("kvs", [])]

    def put(self, key: str, value: str, *, made: int | None = None, of: str = "") -> bool:
        """Write a key if the key `of` was made at a revision; return whether it was.

        Without `made` it is written in any case.
        """
        put = {"key": _coded(key), "value": _coded(value)}
        if made is None:
            self._ask("kv/put", put)
            return True
        body = {"compare": [_made(of, made)], "success": [{"request_put": put}], "failure": []}
        return bool(self._ask("kv/txn", body).get("succeeded"))

    def claim(
        self, key: str, value: str, lease: str, *, still: tuple[str, str] | None = None
    ) -> int:
        """Write a key that is not there, with a lease; return when it was made. 0: it was not.

        With `still` another key must have a value. A member may write the key and its answer be
        lost; the next one that is asked then finds it, with the same lease.
        """
        compare = [_made(key, 0)]
        if still is not None:
            compare.append({
                "key": _coded(still[0]), "target": "VALUE", "result": "EQUAL",
                "value": _coded(still[1]),
            })  # fmt: skip
        put = {"key": _coded(key), "value": _coded(value), "lease": lease}
        body = {
            "compare": compare, "success": [{"request_put": put}],
            "failure": [{"request_range": {"key": _coded(key)}}],
        }  # fmt: skip
        answer = self._ask("kv/txn", body)
        if answer.get("succeeded"):
            return int(answer["header"]["revision"])
        there = answer["responses"][0]["response_range"].get("kvs", [])
        own = [entry for entry in there if entry.get("lease") == lease]
        return _pair(own[0]).made if own else 0

    def delete(self, key: str, *, below: bool = False) -> None:
        """Remove a key, or all that begin with it."""
        end = {"range_end": _coded(_after(key))} if below else {}
        self._ask("kv/deleterange", {"key": _coded(key), **end})

    def grant(self, seconds: int) -> str:
        """Return a lease: keys that are written with it go when it is not kept alive."""
        return str(self._ask("lease/grant", {"TTL": str(seconds)})["ID"])

    def keep(self, lease: str) -> bool:
        """Keep a lease alive; False: it is gone."""
        answer = self._ask("lease/keepalive", {"ID": lease}).get("result", {})
        return int(answer.get("TTL", 0)) > 0

    def revoke(self, lease: str) -> None:
        """End a lease, and the keys that were written with it."""
        self._ask("lease/revoke", {"ID": lease})

    def _ask(self, what: str, body: Mapping[str, Any]) -> dict[str, Any]:
        why = ""
        for _ in range(len(self._members)):
            host, port = self._members[0]
            connection = http.client.HTTPConnection(host, port, timeout=self._limit_s)
            try:
                connection.request("POST", f"/v3/{what}", json.dumps(body))
                response = connection.getresponse()
                answer = json.loads(response.read())
            except (OSError, http.client.HTTPException, ValueError) as error:
                why = f"{host}:{port}: {str(error) or type(error).__name__}"
            else:
                if response.status < 300 and "error" not in answer:
                    return dict(answer)
                said, may_pass = _refusal(response.status, answer)
                why = f"{host}:{port}: {said or response.reason}"
                if not may_pass:
                    raise StoreRefusedError(f"etcd at {why}")
            finally:
                connection.close()
            self._members.append(self._members.pop(0))
        raise StoreAwayError(f"no etcd answers ({why})")


def _refusal(status: int, answer: Mapping[str, Any]) -> tuple[str, bool]:
    """Return what a member said that did not do it, and whether that may pass."""
    error = answer.get("error", "")
    inner = error if isinstance(error, dict) else answer  # of a stream it is one level deeper
    said = str(inner.get("message") or inner.get("error") or "")
    code = int(inner.get("code") or inner.get("grpc_code") or 0)
    return said, (status in _PASSING_STATUS or code in _PASSING) and _FULL not in said


def _made(key: str, revision: int) -> dict[str, str]:
    """Return the condition that a key was made at a revision; 0: is not there."""
    return {
        "key": _coded(key), "target": "CREATE", "result": "EQUAL",
        "create_revision": str(revision),
    }  # fmt: skip


def _pair(entry: Mapping[str, str]) -> Pair:
    value = base64.b64decode(entry.get("value", "")).decode()
    return Pair(base64.b64decode(entry["key"]).decode(), value, int(entry["create_revision"]))


def _coded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def _after(prefix: str) -> str:
    return prefix[:-1] + chr(ord(prefix[-1]) + 1)
