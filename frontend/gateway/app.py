"""The HTTP interface of an engine: what OpenAI's clients expect, and what an operator needs."""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from deepinfer import __version__
from deepinfer.frontend.async_client import AsyncClient
from deepinfer.frontend.errors import EngineError
from deepinfer.frontend.gateway.accounts import CLIENT_LEFT, Accounts, Record
from deepinfer.frontend.gateway.calls import Bodies, Call, Endpoint, Handler
from deepinfer.frontend.gateway.dashboard import page_routes, view_body
from deepinfer.frontend.gateway.errors import ApiError, as_api_error, bad_request, not_found
from deepinfer.frontend.gateway.ledger import Ledger
from deepinfer.frontend.gateway.limits import Turns
from deepinfer.frontend.gateway.metrics import Metrics
from deepinfer.frontend.gateway.openai_answers import Answers, ChatAnswers, CompletionAnswers, Json
from deepinfer.frontend.gateway.openai_requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
    conversation,
    decode,
)
from deepinfer.frontend.gateway.openapi import document
from deepinfer.frontend.gateway.tenants import Tenant, Tenants
from deepinfer.frontend.gateway.token_texts import TokenTexts
from deepinfer.frontend.gateway.tracing import Tracing
from deepinfer.frontend.outputs import RequestOutput
from deepinfer.frontend.session import PreparedPrompt, Prompt
from deepinfer.wire.checks import shown

_REQUEST_ID = re.compile(r"[!-.0-~]{1,128}")  # printable, without a slash
_HEALTH_S = 3.0
_BEGUN_PER_TURN = 4  # some milliseconds
_DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's


class Gateway:
    """Routes and handlers over one engine: an ASGI app.

    ``models`` are the names under which the engine's model is served; the first one is shown.
    """

    def __init__(
        self,
        engine: AsyncClient,
        models: Sequence[str],
        tenants: Tenants,
        *,
        max_body_bytes: int = 8 << 20,
        ledger: Ledger | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        self._engine = engine
        self._models = list(models)
        self._tenants = tenants
        self._metrics = Metrics(tenants, ledger)
        self.accounts = Accounts(self._metrics, lambda each: engine.trace(each), ledger, tracing)
        self._created = int(time.time())
        self._texts: TokenTexts | None = None
        bodies = Bodies(max_body_bytes)
        self._turns = Turns(_BEGUN_PER_TURN)
        handlers = {
            "/v1/completions": self._completions,
            "/v1/chat/completions": self._chat,
            "/tokenize": self._tokenize,
            "/detokenize": self._detokenize,
        }
        self._posts = {
            path: Endpoint(self._counted(path, handler), bodies)
            for path, handler in handlers.items()
        }
        gets = {
            "/v1/models": self._list_models,
            "/v1/models/{model:path}": self._one_model,
            "/v1/requests/{request_id}/story": self._story,
            "/v1/engine/view": self._view,
            "/v1/engine/requests/{request_id:path}/story": self._any_story,
            "/health": self._health,
            "/metrics": self._show_metrics,
            "/openapi.json": self._describe,
        }
        self._others = Starlette(
            routes=[
                # For its answers to other methods; a POST is not routed by it.
                *(Route(path, post, methods=["POST"]) for path, post in self._posts.items()),
                *(Route(path, handler, methods=["GET"]) for path, handler in gets.items()),
                *page_routes(),
            ],
            exception_handlers={
                HTTPException: _on_http_error,
                ApiError: _on_error,
                EngineError: _on_error,
                Exception: _on_error,
            },
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one call. A POST goes straight to its handler: each event of a stream would pass
        through every layer around it.
        """
        post = self._posts.get(scope["path"]) if scope.get("method") == "POST" else None
        await (post or self._others)(scope, receive, send)

    def _counted(self, path: str, handler: Handler) -> Handler:
        """Return the handler, whose calls are counted by their status."""

        async def counted(call: Call) -> None:
            status = CLIENT_LEFT
            try:
                await self._turns.take()
                await handler(call)
                status = call.status
            except Exception as error:
                status = as_api_error(error).status
                raise
            finally:
                self._metrics.request_ended(call.tenant, path, status)

        return counted

    # ---- completions ------------------------------------------------------------------------

    async def _completions(self, call: Call) -> None:
        tenant = self._tenant_of(call)
        request_id = _request_id(call, "cmpl")
        ask = decode(call.body, CompletionRequest)
        model = self._model(ask.model)
        most = tenant.limit_max_tokens(ask.max_tokens)
        params = ask.params(_DEFAULT_COMPLETION_TOKENS if most is None else most)
        prompts = []
        for given in ask.prompts():
            prepared = await self._engine.prepare(given, params)
            prompts.append(self._fitted(prepared, ask.max_tokens is not None))
            # Its bad words are token ids now, and need not be tokenised for the next one.
            params = prepared.params
            await asyncio.sleep(0)  # a short prompt is prepared without giving way to others
        echoed = [self._text(prompt) for prompt in prompts] if ask.echo else []
        answers = CompletionAnswers(
            request_id,
            model,
            int(time.time()),
            prompts,
            self._token_texts(),
            with_ids=bool(ask.return_token_ids),
            with_usage=ask.include_usage,
            echo=bool(ask.echo),
            echoed=echoed,
        )
        await self._run(call, tenant, answers, prompts, ask)

    async def _chat(self, call: Call) -> None:
        tenant = self._tenant_of(call)
        request_id = _request_id(call, "chatcmpl")
        ask = decode(call.body, ChatRequest)
        model = self._model(ask.model)
        most = tenant.limit_max_tokens(ask.most_tokens)
        params = ask.params(self._engine.info.max_model_len if most is None else most)
        prompt = await self._engine.prepare(conversation(ask.messages), params)
        prompts = [self._fitted(prompt, ask.most_tokens is not None)]
        answers = ChatAnswers(
            request_id,
            model,
            int(time.time()),
            prompts,
            self._token_texts(),
            with_ids=bool(ask.return_token_ids),
            with_usage=ask.include_usage,
        )
        await self._run(call, tenant, answers, prompts, ask)

    def _fitted(self, prompt: PreparedPrompt, asked: bool) -> PreparedPrompt:
        """Return the prompt with no more ``max_tokens`` than there is room for.

        ``ApiError`` 400 when the client asked for more.
        """
        limit, length = self._engine.info.max_model_len, len(prompt.token_ids)
        wanted = prompt.params.max_tokens
        # A prompt that fills the context has its next token in it: the engine yields that one.
        room = max(1, limit - length)
        if wanted <= room:
            return prompt
        if asked:
            raise bad_request(
                f"this model takes {limit} tokens, and {length + wanted} were asked for: "
                f"{length} of the prompt and max_tokens = {wanted}",
                "max_tokens",
                "context_length_exceeded",
            )
        return prompt._replace(params=msgspec.structs.replace(prompt.params, max_tokens=room))

    async def _run(
        self,
        call: Call,
        tenant: Tenant,
        answers: Answers,
        prompts: list[PreparedPrompt],
        ask: CompletionRequest | ChatRequest,
    ) -> None:
        """Let the engine answer, and the client have it."""
        priority = tenant.check_priority(ask.priority)
        engine_ids = [
            f"{tenant.name}/{answers.request_id}" + (f"/{number}" if number else "")
            for number in range(len(prompts))
        ]
        endpoint, model = call.path, answers.model
        record = Record(
            tenant.name,
            endpoint,
            answers.request_id,
            engine_ids,
            model,
            answers.usage,
            [len(prompt.token_ids) for prompt in prompts],
        )
        status, code = CLIENT_LEFT, ""

        def served() -> None:
            # Before the end of the answer is sent: who has it finds it in the ledger.
            self.accounts.close(record, 200, "", call.headers)

        def take(prompt: int, output: RequestOutput) -> list[Json]:
            tenant.spend(self.accounts.note(record, prompt, output))
            return answers.take(prompt, output)

        try:
            async with tenant.admit() as admission:
                record.queued_s = admission.queued_s
                tenant.spend(answers.usage.prompt_tokens)
                batches = self._batches(call, tenant, priority, engine_ids, prompts)
                async with aclosing(batches):
                    if ask.stream:
                        async with aclosing(_chunks(answers, batches, take)) as chunks:
                            await call.stream(_followed_by(chunks, served))
                    else:
                        async for prompt, outputs in batches:
                            for output in outputs:
                                take(prompt, output)
            if not ask.stream:
                whole = answers.whole()
                served()
                await call.reply(whole)
        except Exception as error:
            known = as_api_error(error)
            status, code = known.status, known.code or known.kind
            raise
        finally:
            self.accounts.close(record, status, code, call.headers)

    async def _batches(
        self,
        call: Call,
        tenant: Tenant,
        priority: int,
        engine_ids: list[str],
        prompts: list[PreparedPrompt],
    ) -> AsyncGenerator[tuple[int, list[RequestOutput]], None]:
        """Yield the outputs of all prompts as they come, each with the number of its prompt."""

        def generate(number: int) -> aclosing[AsyncGenerator[list[RequestOutput], None]]:
            batches = self._engine.generate_batches(
                prompts[number],
                request_id=engine_ids[number],
                user_id=tenant.name,
                priority=priority,
                weight=tenant.weight,
                cache_salt=tenant.cache_salt,
                has_left=lambda: call.left,
            )
            return aclosing(batches)

        if len(prompts) == 1:
            async with generate(0) as batches:
                async for outputs in batches:
                    yield 0, outputs
            return
        arrived: asyncio.Queue[tuple[int, list[RequestOutput] | Exception]] = asyncio.Queue()

        async def pump(number: int) -> None:
            try:
                async with generate(number) as batches:
                    async for outputs in batches:
                        arrived.put_nowait((number, outputs))
                arrived.put_nowait((number, []))
            except Exception as error:
                arrived.put_nowait((number, error))

        tasks = [asyncio.ensure_future(pump(number)) for number in range(len(prompts))]
        try:
            open_prompts = len(prompts)
            while open_prompts:
                number, item = await arrived.get()
                if isinstance(item, Exception):
                    raise item
                if item:
                    yield number, item
                else:
                    open_prompts -= 1
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    # ---- tokens -----------------------------------------------------------------------------

    async def _tokenize(self, call: Call) -> None:
        self._tenant_of(call)
        ask = decode(call.body, TokenizeRequest)
        self._model(ask.model)
        if (ask.prompt is None) == (ask.messages is None):
            raise bad_request("prompt or messages: give one of them", "prompt")
        prompt: Prompt = ask.prompt if ask.prompt is not None else conversation(ask.messages or [])
        tokens = (await self._engine.prepare(prompt)).token_ids
        if not (ask.add_special_tokens and ask.add_generation_prompt):
            # Not how a prompt is taken, but it is short enough now.
            tokens = await asyncio.to_thread(self._tokens_without, ask)
        limit = self._engine.info.max_model_len
        await call.reply({"tokens": tokens, "count": len(tokens), "max_model_len": limit})

    async def _detokenize(self, call: Call) -> None:
        self._tenant_of(call)
        ask = decode(call.body, DetokenizeRequest)
        self._model(ask.model)
        prepared = await self._engine.prepare(ask.tokens)
        await call.reply({"prompt": self._text(prepared)})

    def _tokens_without(self, ask: TokenizeRequest) -> list[int]:
        """The tokens without the special ones around a text, or what begins an answer."""
        tokenizer = self._engine.tokenizer
        assert tokenizer is not None
        if ask.prompt is not None:
            return tokenizer.encode(ask.prompt, ask.add_special_tokens)
        images = self._engine.info.images is not None
        return tokenizer.render_chat(ask.messages, ask.add_generation_prompt, images=images)

    def _text(self, prompt: PreparedPrompt) -> str:
        """The text of a prompt, its special tokens too where it was given as ids."""
        if prompt.text is not None:
            return prompt.text
        tokenizer = self._engine.tokenizer
        assert tokenizer is not None
        return tokenizer.decode(prompt.token_ids, skip_special_tokens=False)

    def _token_texts(self) -> TokenTexts:
        if self._texts is None:
            tokenizer = self._engine.tokenizer
            assert tokenizer is not None
            self._texts = TokenTexts(tokenizer)
        return self._texts

    # ---- looking in -------------------------------------------------------------------------

    async def _list_models(self, request: Request) -> Response:
        self._identify(request.headers.get("authorization"))
        models = [self._card(name) for name in self._models]
        return _json({"object": "list", "data": models})

    async def _one_model(self, request: Request) -> Response:
        self._identify(request.headers.get("authorization"))
        return _json(self._card(self._model(request.path_params["model"])))

    async def _story(self, request: Request) -> Response:
        tenant = self._identify(request.headers.get("authorization"))
        request_id = request.path_params["request_id"]
        return await self._tell(f"{tenant.name}/{request_id}", request_id, tenant)

    async def _any_story(self, request: Request) -> Response:
        """The story of any request, named by the engine's own id as a view shows it."""
        operator = self._operator(request.headers.get("authorization"))
        request_id = request.path_params["request_id"]
        return await self._tell(request_id, request_id, operator)

    async def _tell(self, engine_id: str, shown_id: str, reader: Tenant) -> Response:
        try:
            events = await self._engine.trace(engine_id)
        except KeyError:
            message = f"no request {shown(shown_id)} runs or has ended lately"
            raise not_found(message, "request_not_found") from None
        if not reader.operator:
            events = [
                event.without_other("another tenant's request")
                if "by_user" in event.detail
                else event
                for event in events
            ]
        return _json({"id": shown_id, "object": "request.story", "events": [
            {"at_ms": event.at_ms, "event": event.event, "detail": event.detail}
            for event in events
        ]})  # fmt: skip

    async def _view(self, request: Request) -> Response:
        self._operator(request.headers.get("authorization"))
        view = await self._engine.view()
        return _json(view_body(self._engine.info, self._models, view))

    async def _health(self, request: Request) -> Response:
        try:
            async with asyncio.timeout(_HEALTH_S):
                health = await self._engine.health()
        except TimeoutError:
            cause = f"the engine did not answer in {_HEALTH_S:g} s"
            health = {"ok": False, "cause": cause, "down": False}
        return _json(health, 200 if health["ok"] else 503)

    async def _show_metrics(self, request: Request) -> Response:
        self._operator(request.headers.get("authorization"))
        try:
            stats = await self._engine.stats()
            self._metrics.served(await self._engine.tenants())
        except EngineError:
            stats = None
        page = self._metrics.render(stats)
        return Response(page, headers={"content-type": self._metrics.content_type})

    async def _describe(self, request: Request) -> Response:
        return _json(document(__version__))

    def _card(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "deepinfer",
            "max_model_len": self._engine.info.max_model_len,
        }

    # ---- who and what -----------------------------------------------------------------------

    def _identify(self, authorization: str | None) -> Tenant:
        return self._tenants.identify(authorization)

    def _tenant_of(self, call: Call) -> Tenant:
        tenant = self._identify(call.headers.get("authorization"))
        call.tenant = tenant.name
        return tenant

    def _operator(self, authorization: str | None) -> Tenant:
        """Let only those in who may see all tenants; ``ApiError`` 401 or 403."""
        tenant = self._identify(authorization)
        if not tenant.operator:
            raise ApiError(
                403,
                "this API key is not an operator's: its tenant has no operator = true",
                kind="permission_error",
                code="operator_only",
            )
        return tenant

    def _model(self, name: str | None) -> str:
        """Return the name of a model that is served: the first one when none is asked for."""
        if name is None:
            return self._models[0]
        if name not in self._models:
            known = ", ".join(self._models)
            message = f"the model {shown(name)} does not exist; here is {known}"
            raise not_found(message, "model_not_found", "model")
        return name


async def _chunks(
    answers: Answers,
    batches: AsyncIterator[tuple[int, list[RequestOutput]]],
    take: Callable[[int, RequestOutput], list[Json]],
) -> AsyncGenerator[list[bytes], None]:
    """Yield the chunks of a stream, those of a batch together."""
    async for prompt, outputs in batches:
        chunks: list[bytes] = []
        error: ApiError | None = None
        for output in outputs:
            try:
                chunks += map(answers.chunk, take(prompt, output))
            except ApiError as failure:
                error = failure
                break
        yield chunks
        if error is not None:
            raise error
    if answers.with_usage:
        yield [answers.usage_chunk()]


async def _followed_by(
    items: AsyncIterator[list[bytes]], action: Callable[[], None]
) -> AsyncIterator[list[bytes]]:
    async for item in items:
        yield item
    action()


def _request_id(call: Call, prefix: str) -> str:
    """Return the id of a request, made of the client's own where it sent one."""
    given = call.headers.get("x-request-id")
    if given is not None and not _REQUEST_ID.fullmatch(given):
        raise bad_request(
            f"x-request-id must be 1 to 128 printable ASCII characters without a space or slash, "
            f"got {shown(given)}",
            "x-request-id",
        )
    request_id = f"{prefix}-{uuid.uuid4().hex if given is None else given}"
    call.answer_headers["x-request-id"] = request_id
    return request_id


def _json(content: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    body = msgspec.json.encode(content)
    return Response(body, status, headers, media_type="application/json")


async def _on_error(request: Request, error: Exception) -> Response:
    known = as_api_error(error)
    return _json(known.body(), known.status, known.headers())


async def _on_http_error(request: Request, error: Exception) -> Response:
    """The router's own errors, as OpenAI's error objects."""
    assert isinstance(error, HTTPException)
    message = f"{request.method} {shown(request.url.path)}: {error.detail}"
    known = ApiError(error.status_code, message, code=f"http_{error.status_code}")
    return _json(known.body(), known.status, dict(error.headers or {}))
