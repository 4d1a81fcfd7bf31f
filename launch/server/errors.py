"""What a client is told when a request cannot be served, in the OpenAI API's shape."""

from __future__ import annotations

from typing import Any

from starlette.responses import JSONResponse

from protocol.errors import HeadraceError, ReadError, StallError, UsageError


class ApiError(Exception):
    """An answer with an error status. `param` names the field that is wrong."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.headers = headers or {}

    def body(self) -> dict[str, Any]:
        """The JSON body, also what a stream carries when it fails midway."""
        return {
            "error": {
                "message": str(self),
                "type": _TYPES.get(
                    self.status, "server_error" if self.status >= 500 else "invalid_request_error"
                ),
                "param": self.param,
                "code": self.code,
            }
        }

    def response(self) -> JSONResponse:
        """The whole HTTP answer."""
        return JSONResponse(self.body(), self.status, self.headers)


_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


# By exit code, which says what kind of error it is. A disk that stalled may answer next time, and a
# machine or a group that is not there may be again; what is wrong in the data or here stays so.
_STATUS = {
    HeadraceError.exit_code: 500,
    UsageError.exit_code: 400,
    StallError.exit_code: 504,
    ReadError.exit_code: 500,
}


def engine_error(error: HeadraceError) -> ApiError:
    """What the engine could not do, with the status that says whether to try again."""
    return ApiError(_STATUS.get(error.exit_code, 503), str(error))


def bad_field(param: str, message: str) -> ApiError:
    """400 that names the field."""
    return ApiError(400, f"{param}: {message}", param=param)
