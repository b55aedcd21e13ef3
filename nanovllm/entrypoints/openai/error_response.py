"""From an exception to OpenAI's error object and its HTTP status.

Upstream: vllm/entrypoints/serve/utils/error_response.py (0.23.0). There a dead engine is a 500;
here 503, as a client may try elsewhere.
"""

from __future__ import annotations

from http import HTTPStatus

from nanovllm.entrypoints.openai.protocol import ErrorInfo, ErrorResponse
from nanovllm.exceptions import VLLMNotFoundError, VLLMValidationError
from nanovllm.v1.engine.exceptions import EngineDeadError

# A message may quote the value it complains of, and that may be megabytes.
MAX_MESSAGE_LEN = 1000


class GenerationError(Exception):
    """The engine ended this request with finish_reason "error"."""


class QueueFullError(Exception):
    """More requests wait than --max-num-waiting allows."""


class RequestTooLargeError(Exception):
    """The body is longer than --max-request-size."""


def create_error_response(
    message: str | Exception,
    status_code: HTTPStatus = HTTPStatus.BAD_REQUEST,
    param: str | None = None,
) -> ErrorResponse:
    """The error object for an exception, or for a message of one's own.

    An exception that is nobody's fault but ours becomes a 500 without its text, which may hold
    parts of somebody's prompt; the server's log has the traceback.
    """
    if isinstance(message, Exception):
        exc = message
        message, status_code = str(exc), _status_of(exc)
        if isinstance(exc, VLLMValidationError):
            param = exc.parameter
        if status_code is HTTPStatus.INTERNAL_SERVER_ERROR:
            message = f"the server failed on this request ({type(exc).__name__}); see its log."
    return ErrorResponse(
        error=ErrorInfo(
            message=sanitize_message(message),
            type=_type_of(status_code),
            param=param,
            code=status_code.value,
        )
    )


def sanitize_message(message: str) -> str:
    """Short enough to send, and valid Unicode, whatever the request had in it."""
    message = message.encode("utf-8", "backslashreplace").decode()
    if len(message) > MAX_MESSAGE_LEN:
        message = f"{message[:MAX_MESSAGE_LEN]}... ({len(message)} characters)"
    return message


def _status_of(exc: Exception) -> HTTPStatus:
    if isinstance(exc, VLLMValidationError):
        return HTTPStatus.BAD_REQUEST
    if isinstance(exc, VLLMNotFoundError):
        return HTTPStatus.NOT_FOUND
    if isinstance(exc, QueueFullError):
        return HTTPStatus.TOO_MANY_REQUESTS
    if isinstance(exc, RequestTooLargeError):
        return HTTPStatus.REQUEST_ENTITY_TOO_LARGE
    if isinstance(exc, EngineDeadError):
        return HTTPStatus.SERVICE_UNAVAILABLE
    return HTTPStatus.INTERNAL_SERVER_ERROR


def _type_of(status_code: HTTPStatus) -> str:
    if status_code is HTTPStatus.BAD_REQUEST:
        return "BadRequestError"
    if status_code is HTTPStatus.NOT_FOUND:
        return "NotFoundError"
    return status_code.phrase.replace(" ", "") + "Error" * (status_code.value < 500)
