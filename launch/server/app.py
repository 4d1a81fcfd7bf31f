"""The server's routes. Each checks what it is given, asks the service, and shapes the answer."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from launch.chat_format.reply import ReplyParser
from launch.server.answers import PlainReader
from launch.server.bodies import ChatBody, CompletionBody, parse_body
from launch.server.connection import ClientLeft, read_body, while_connected
from launch.server.engine import Engine
from launch.server.errors import ApiError, engine_error
from launch.server.guard import Guard
from launch.server.metrics import metrics_text
from launch.server.monitor import KEPT_SAMPLES, Monitor, health
from launch.server.options import ServerOptions
from launch.server.page import page
from launch.server.recording import MOST_TOKENS, Recorder
from launch.server.service import Service
from launch.server.shapes import ChatShape, CompletionShape
from protocol.errors import HeadraceError


def build_app(engine: Engine, options: ServerOptions, log: Callable[[str], None]) -> Starlette:
    """The ASGI application over a started engine. Raises HeadraceError."""
    service = Service(engine, options, log)
    monitor = Monitor(engine, service.activity, service.line)
    recorder = Recorder(engine, service.activity)

    async def chat_completions(request: Request) -> Response:
        body = parse_body(await read_body(request, options.max_body), ChatBody)
        service.check_model(body.model)
        conversation = service.translator.conversation(body)
        generate = await service.translator.chat_options(body, conversation)
        tokens = service.translator.chat_tokens
        assert tokens is not None
        reader = ReplyParser(
            service.token_bytes,
            tokens,
            service.vocabulary.special,
            conversation,
            accept_calls=bool(conversation.tools),
        )
        shape = ChatShape(service.model, service.token_bytes, stream=body.stream)
        return await service.respond(request, body, generate, reader, shape)

    async def completions(request: Request) -> Response:
        body = parse_body(await read_body(request, options.max_body), CompletionBody)
        service.check_model(body.model)
        generate = await service.translator.completion_options(body)
        shape = CompletionShape(service.model, service.token_bytes)
        reader = PlainReader(service.token_bytes)
        return await service.respond(request, body, generate, reader, shape)

    async def models(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [service.describe_model()]})

    async def model(request: Request) -> Response:
        service.check_model(request.path_params["name"])
        return JSONResponse(service.describe_model())

    async def show_health(request: Request) -> Response:
        status, body = await health(engine)
        return JSONResponse(body, status)

    async def metrics(request: Request) -> Response:
        text = metrics_text(await engine.stats(), service.activity, service.line)
        return Response(text, media_type="text/plain; version=0.0.4")

    async def stats(request: Request) -> Response:
        history = min(_count(request, "history", default=0) or 0, KEPT_SAMPLES)
        await monitor.look()
        return JSONResponse({"model": service.model, **monitor.figures(history)})

    async def residency(request: Request) -> Response:
        return JSONResponse(monitor.residency())

    async def trace(request: Request) -> Response:
        wanted = _count(request, "tokens", default=100)
        if wanted is None or not 1 <= wanted <= MOST_TOKENS:
            raise ApiError(400, f"tokens: expected 1 to {MOST_TOKENS}", param="tokens")
        try:
            recorded = await while_connected(request.receive, recorder.record(wanted))
        except ClientLeft:
            return Response(status_code=499)
        headers = {"Content-Disposition": 'attachment; filename="headrace-trace.json"'}
        return Response(recorded, headers=headers, media_type="application/json")

    async def show_page(request: Request) -> Response:
        return HTMLResponse(page().text, headers=page().headers)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        try:
            yield
        finally:
            await monitor.close()

    app = Starlette(
        routes=[
            Route("/v1/chat/completions", chat_completions, methods=["POST"]),
            Route("/v1/completions", completions, methods=["POST"]),
            Route("/v1/models", models),
            Route("/v1/models/{name:path}", model),
            Route("/health", show_health),
            Route("/metrics", metrics),
            Route("/stats", stats),
            Route("/residency", residency),
            Route("/trace", trace, methods=["POST"]),
            Route("/", show_page),
        ],
        middleware=[Middleware(Guard, options.api_key, options.loopback)],
        exception_handlers={
            ApiError: _api_error,
            HeadraceError: _engine_error,
            ClientDisconnect: _client_left,
            404: _not_found,
            405: _not_allowed,
            500: _unexpected,
        },
        lifespan=lifespan,
    )
    app.state.service = service
    return app


def _count(request: Request, name: str, default: int) -> int | None:
    """The number that the query gives under `name`; None where that is none."""
    given = request.query_params.get(name, str(default))
    return int(given) if re.fullmatch("[0-9]{1,9}", given) else None


async def _client_left(request: Request, error: Exception) -> Response:
    """For the log: there is nobody to read it."""
    return Response(status_code=499)


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


async def _engine_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HeadraceError)
    return engine_error(error).response()


async def _not_found(request: Request, error: Exception) -> Response:
    return ApiError(404, f"there is no {request.url.path} here").response()


async def _not_allowed(request: Request, error: Exception) -> Response:
    return ApiError(405, f"{request.url.path} does not take {request.method}").response()


async def _unexpected(request: Request, error: Exception) -> Response:
    return ApiError(500, f"unexpected {type(error).__name__}; please report it").response()
