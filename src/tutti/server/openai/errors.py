"""Errors in OpenAI's form: one line for the user, the status that clients act upon."""

from __future__ import annotations

from typing import Any

_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"description": text, "content": {"application/json": {"schema": _ERROR}}}
    for status, text in {
        400: "The request cannot be", 401: "No key, or a wrong one", 404: "No such model",
        408: "It did not come in time", 413: "Too long", 429: "Too many requests", 503: "No engine",
    }.items()
}  # fmt: skip


class ApiError(Exception):
    """A request that is answered with an error."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        parameter: str | None = None,
        code: str | None = None,
        retry_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.kind = status, message, kind
        self.parameter, self.code, self.retry_s = parameter, code, retry_s

    def body(self) -> dict[str, Any]:
        """Return the answer's body."""
        return {
            "error": {
                "message": self.message,
                "type": self.kind,
                "param": self.parameter,
                "code": self.code,
            }
        }

    def headers(self) -> dict[str, str]:
        """Return the answer's headers."""
        if self.status == 401:
            return {"WWW-Authenticate": "Bearer"}
        return {} if self.retry_s is None else {"Retry-After": str(self.retry_s)}


def refused(message: str, parameter: str | None = None, code: str | None = None) -> ApiError:
    """Return the error of a request that cannot be."""
    return ApiError(400, message, parameter=parameter, code=code)


def not_found(message: str, code: str = "model_not_found") -> ApiError:
    """Return the error of a name that nobody has."""
    return ApiError(404, message, kind="not_found_error", code=code)


def busy(asked: int, most: int) -> ApiError:
    """Return the error of a server that has enough to do."""
    return ApiError(
        429,
        f"{asked} requests are here of {most} that may be; try again in a second",
        kind="rate_limit_error",
        code="queue_full",
        retry_s=1,
    )


def unavailable(message: str) -> ApiError:
    """Return the error of a server that takes nothing now."""
    return ApiError(503, message, kind="service_unavailable_error", retry_s=2)


def engine_failed(message: str) -> ApiError:
    """Return the error of a request that failed here, through no mistake of the client's."""
    return ApiError(500, message, kind="server_error")


def hook_failed(message: str) -> ApiError:
    """Return the error of a request whose hook failed."""
    return ApiError(500, message, kind="server_error", code="hook_failed")
