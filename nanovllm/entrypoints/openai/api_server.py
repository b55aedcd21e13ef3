"""The HTTP server: routes to handlers, start and end of the process.

    nanovllm serve -> run_server: bind the port, start AsyncLLM, build_app, listen
      POST /v1/completions          OpenAIServingCompletion
      POST /v1/chat/completions     OpenAIServingChat
      POST .../render               the same, up to the prompt and parameters the engine would get
      POST /tokenize, /detokenize   OpenAIServingTokenization
      GET  /v1/models /health /version /metrics        POST /reset_prefix_cache

On SIGTERM or Ctrl-C the port is closed, running requests get `shutdown_timeout` seconds to end,
what is left is aborted, and the engine is shut down. A second signal does not wait.

Upstream: vllm/entrypoints/openai/api_server.py, vllm/entrypoints/launcher.py and the api_router.py
files (0.23.0), one file here.
Left out: several API servers, TLS, Unix sockets, CORS, and upstream's other APIs. Render shows the
text, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

import uvicorn
from fastapi import APIRouter, Depends, FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException as StarletteHTTPException

from nanovllm import __version__
from nanovllm.engine.arg_utils import EngineArgs
from nanovllm.entrypoints.chat_utils import load_chat_template
from nanovllm.entrypoints.openai.cli_args import FrontendArgs
from nanovllm.entrypoints.openai.error_response import GenerationError, QueueFullError
from nanovllm.entrypoints.openai.protocol import (
    ChatCompletionRequest,
    ChatCompletionResponse,
    CompletionRequest,
    CompletionResponse,
    DetokenizeRequest,
    DetokenizeResponse,
    ErrorResponse,
    ModelCard,
    ModelList,
    RenderResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from nanovllm.entrypoints.openai.request_logger import RequestLogger
from nanovllm.entrypoints.openai.server_utils import (
    EXCEPTION_HANDLERS,
    AuthenticationMiddleware,
    EventStreamResponse,
    RequestSizeMiddleware,
    exception_handler,
    http_exception_handler,
    run_unless_disconnected,
    validate_json_request,
)
from nanovllm.entrypoints.openai.serving_chat import OpenAIServingChat
from nanovllm.entrypoints.openai.serving_completion import OpenAIServingCompletion
from nanovllm.entrypoints.openai.serving_engine import AdmissionControl, EventStream
from nanovllm.entrypoints.openai.serving_models import OpenAIServingModels
from nanovllm.entrypoints.openai.serving_tokenization import OpenAIServingTokenization
from nanovllm.exceptions import VLLMValidationError
from nanovllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError
from nanovllm.v1.metrics import prometheus
from nanovllm.v1.metrics.loggers import StatLoggerManager

try:
    from uvloop import new_event_loop
except ImportError:  # Windows
    from asyncio import new_event_loop  # type: ignore[assignment]

if TYPE_CHECKING:
    from nanovllm.v1.engine.async_llm import AsyncLLM

logger = logging.getLogger(__name__)

# Seconds between two looks at whether the engine is alive.
WATCHDOG_INTERVAL = 1.0

ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorResponse} for status in (400, 401, 404, 413, 415, 429, 500, 503)
}
router = APIRouter(responses=ERRORS)
JSON_BODY = [Depends(validate_json_request)]


# ---- generation ----


@router.post("/v1/completions", dependencies=JSON_BODY, response_model=CompletionResponse)
async def create_completion(request: CompletionRequest, raw_request: Request) -> Response:
    """Complete one prompt or several; server-sent events with stream=true."""
    handler: OpenAIServingCompletion = raw_request.app.state.openai_serving_completion
    return await _respond(raw_request, handler.create_completion(request, raw_request))


@router.post("/v1/chat/completions", dependencies=JSON_BODY, response_model=ChatCompletionResponse)
async def create_chat_completion(request: ChatCompletionRequest, raw_request: Request) -> Response:
    """Write the next message of a conversation; server-sent events with stream=true."""
    handler: OpenAIServingChat = raw_request.app.state.openai_serving_chat
    return await _respond(raw_request, handler.create_chat_completion(request, raw_request))


async def _respond(raw_request: Request, work: Any) -> Response:
    result = await run_unless_disconnected(raw_request, work)
    if isinstance(result, EventStream):
        return EventStreamResponse(result)
    if isinstance(result, Response):
        return result
    return Response(result.model_dump_json(), media_type="application/json")


# ---- looking at prompts and tokens ----


@router.post("/v1/completions/render", dependencies=JSON_BODY, response_model=list[RenderResponse])
async def render_completion(request: CompletionRequest, raw_request: Request) -> Any:
    """The prompts, tokens and parameters that /v1/completions would give the engine."""
    return raw_request.app.state.openai_serving_completion.render(request, raw_request)


@router.post("/v1/chat/completions/render", dependencies=JSON_BODY, response_model=RenderResponse)
async def render_chat_completion(request: ChatCompletionRequest, raw_request: Request) -> Any:
    """The prompt, tokens and parameters that /v1/chat/completions would give the engine."""
    return raw_request.app.state.openai_serving_chat.render(request, raw_request)


@router.post("/tokenize", dependencies=JSON_BODY, response_model=TokenizeResponse)
async def tokenize(request: TokenizeRequest, raw_request: Request) -> Any:
    """Token ids of a prompt or a conversation."""
    return raw_request.app.state.openai_serving_tokenization.create_tokenize(request)


@router.post("/detokenize", dependencies=JSON_BODY, response_model=DetokenizeResponse)
async def detokenize(request: DetokenizeRequest, raw_request: Request) -> Any:
    """Text of token ids."""
    return raw_request.app.state.openai_serving_tokenization.create_detokenize(request)


# ---- the server itself ----


@router.get("/v1/models", response_model=ModelList)
async def show_available_models(raw_request: Request) -> Any:
    return raw_request.app.state.openai_serving_models.show_available_models()


@router.get("/v1/models/{model:path}", response_model=ModelCard)
async def show_model(model: str, raw_request: Request) -> Any:
    return raw_request.app.state.openai_serving_models.show_model(model)


@router.get("/health", response_class=Response)
async def health(raw_request: Request) -> Response:
    """200 while the engine runs, 503 once it has died."""
    await raw_request.app.state.engine_client.check_health()
    return Response()


@router.get("/version")
async def show_version() -> JSONResponse:
    return JSONResponse({"version": __version__})


@router.get("/metrics", response_class=Response)
async def metrics(raw_request: Request) -> Response:
    """Prometheus metrics, under vLLM's names."""
    manager: StatLoggerManager | None = raw_request.app.state.logger_manager
    registry = None if manager is None else manager.prometheus_registry
    if registry is None:
        raise HTTPException(404, "this server keeps no metrics (--disable-log-stats).")
    body, content_type = prometheus.render(registry)
    return Response(body, media_type=content_type)


@router.post("/reset_prefix_cache", response_class=Response)
async def reset_prefix_cache(raw_request: Request) -> Response:
    """Forget cached prefixes; 409, and nothing done, while requests hold blocks."""
    if not await raw_request.app.state.engine_client.reset_prefix_cache():
        raise HTTPException(409, "the prefix cache is in use: requests are running.")
    return Response()


# ---- building and running it ----


def build_app(args: FrontendArgs) -> FastAPI:
    """The application; `init_app_state` gives it its engine."""
    app = FastAPI(
        title="nanovllm", version=__version__, lifespan=lifespan, redoc_url=None, docs_url=None
    )
    app.include_router(router)
    for exception, handler in EXCEPTION_HANDLERS.items():
        app.exception_handler(exception)(handler)
    for exception in (EngineDeadError, EngineGenerateError, GenerationError, QueueFullError):
        app.exception_handler(exception)(exception_handler)
    app.exception_handler(StarletteHTTPException)(http_exception_handler)
    app.exception_handler(Exception)(exception_handler)
    app.add_middleware(RequestSizeMiddleware, max_request_size=args.max_request_size)
    if args.api_key:
        app.add_middleware(AuthenticationMiddleware, tokens=args.api_key)
    return app


def init_app_state(engine_client: AsyncLLM, app: FastAPI, args: FrontendArgs) -> None:
    """Make the handlers.

    Raises:
        VLLMValidationError: the chat template cannot be used.
    """
    state = app.state
    state.engine_client = engine_client
    state.on_engine_dead = lambda: None
    state.logger_manager = engine_client.logger_manager
    if state.logger_manager is not None:
        state.logger_manager.log_engine_initialized()
    state.admission = AdmissionControl(
        engine_client.vllm_config.scheduler_config.max_num_seqs, args.max_num_waiting
    )
    request_logger = RequestLogger(args.enable_log_requests)
    options = {
        "enable_prompt_tokens_details": args.enable_prompt_tokens_details,
        "enable_force_include_usage": args.enable_force_include_usage,
    }
    state.openai_serving_models = OpenAIServingModels(engine_client.model_config)
    state.openai_serving_completion = OpenAIServingCompletion(
        engine_client, state.admission, request_logger, **options
    )
    state.openai_serving_chat = OpenAIServingChat(
        engine_client,
        state.admission,
        request_logger,
        chat_template=load_chat_template(args.chat_template),
        trust_request_chat_template=args.trust_request_chat_template,
        response_role=args.response_role,
        **options,
    )
    state.openai_serving_tokenization = OpenAIServingTokenization(state.openai_serving_chat)


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """What runs beside the requests: the log's line now and then, a look at the engine."""
    manager: StatLoggerManager | None = app.state.logger_manager
    tasks = [asyncio.create_task(_watchdog(app))]
    if manager is not None:
        tasks.append(asyncio.create_task(manager.log_forever()))
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _watchdog(app: FastAPI) -> None:
    """A dead engine ends the server, also if no request comes that would meet it."""
    while not app.state.engine_client.errored:
        await asyncio.sleep(WATCHDOG_INTERVAL)
    app.state.on_engine_dead()


def create_server_socket(host: str, port: int) -> socket.socket:
    """A bound socket, before anything slow is done.

    Raises:
        VLLMValidationError: the address is in use or is none.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except (OSError, OverflowError) as e:
        raise VLLMValidationError(
            f"{host}:{port} cannot be listened on: {e}.", parameter="port", value=port
        ) from None
    return sock


class Server(uvicorn.Server):
    """Ends in good order on the first signal, at once on the second.

    uvicorn raises the signal again once it has ended, which would kill the process before the
    engine is shut down.
    """

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            self.force_exit = True
        self.should_exit = True


def make_server(app: FastAPI, args: FrontendArgs) -> Server:
    """The HTTP server of an application; a dead engine makes it end."""
    server = Server(
        uvicorn.Config(
            app,
            log_level=args.uvicorn_log_level,
            access_log=not args.disable_uvicorn_access_log,
            timeout_graceful_shutdown=args.shutdown_timeout,
            lifespan="on",
            ws="none",
        )
    )

    def on_engine_dead() -> None:
        server.should_exit = True

    app.state.on_engine_dead = on_engine_dead
    return server


def run_server(engine_args: EngineArgs, args: FrontendArgs) -> None:
    """Serve until a signal comes.

    Raises:
        VLLMValidationError: the model, the port or another argument cannot be used.
        EngineDeadError: the engine died, and the server with it.
    """
    args.check()
    with (
        contextlib.closing(create_server_socket(args.host, args.port)) as sock,
        asyncio.Runner(loop_factory=new_event_loop) as runner,
    ):
        runner.run(_serve(engine_args, args, sock))


async def _serve(engine_args: EngineArgs, args: FrontendArgs, sock: socket.socket) -> None:
    # (Imported here: they bring torch, which --help can do without.)
    from nanovllm.v1.engine.async_llm import AsyncLLM
    from nanovllm.v1.utils import freeze_gc_heap

    engine_client = AsyncLLM.from_engine_args(
        engine_args,
        client=args.engine_client,  # type: ignore[arg-type]  # the flag has these choices
    )
    try:
        app = build_app(args)
        init_app_state(engine_client, app, args)
        server = make_server(app, args)
        host, port = sock.getsockname()[:2]
        address = f"[{host}]" if ":" in host else host
        freeze_gc_heap()
        # Before the line below is written: whoever waits for it may connect at once.
        sock.listen()
        logger.info(
            "Serving %s on http://%s:%d",
            engine_client.model_config.served_model_name,
            address,
            port,
        )
        await server.serve(sockets=[sock])
        await engine_client.check_health()
    finally:
        engine_client.shutdown()
