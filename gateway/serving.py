"""From a parsed request to its response, streamed or whole: the part that both kinds of request share."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Protocol
from uuid import uuid4

from fastapi import Request
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from gateway.answers import Answer, Delta, deltas, join
from gateway.attempts import Attempts
from gateway.chat import ChatShape
from gateway.completions import CompletionShape
from gateway.config import GatewayConfig
from gateway.errors import BadRequest, BodyTooLarge, ClientGone, DeadlinePassed, NoSuchModel
from gateway.events import DONE, Chunks, EventStream, dumps, watch
from gateway.journal import Record
from gateway.openai import AbortRequest, AnswerRequest, ChatRequest, CompletionRequest, Prompt, parse
from gateway.streams import Inbox
from gateway.tokenizer import Tokenizer

_GRACE_S = 5.0
"""After the deadline, for a slow client to read the error that tells of it."""


class Shape(Protocol):
    """How one kind of response looks."""

    chunk_object: str
    whole_object: str

    def response_fields(self) -> dict[str, Any]:
        """Fields of the whole response, or of the first chunk, beside its choices."""
        ...

    def chunk(self, delta: Delta) -> dict[str, Any]:
        """The choice of one chunk of the stream."""
        ...

    def choice(self, delta: Delta) -> dict[str, Any]:
        """The choice of the whole response."""
        ...


@dataclass(frozen=True, slots=True)
class Serving:
    """What answering needs, made once; its methods are the routes."""

    config: GatewayConfig
    tokenizer: Tokenizer
    attempts: Attempts

    async def completions(self, http: Request) -> Response:
        """`POST /v1/completions`."""
        asked = parse(CompletionRequest, await self._body(http))
        self._check_model(asked)
        if len(asked.prompts) > self.config.max_queue:
            raise BadRequest(
                f"prompt: a batch of {len(asked.prompts)} is over the limit of {self.config.max_queue}; send fewer",
                param="prompt",
            )
        prompts = [await self._prompt_ids(prompt) for prompt in asked.prompts]
        records = self._records("cmpl-", asked, prompts, asked.wanted_tokens, asked.logprobs)
        return await self._respond(http, asked, records, CompletionShape(asked, records, self.tokenizer.vocabulary))

    async def chat(self, http: Request) -> Response:
        """`POST /v1/chat/completions`."""
        asked = parse(ChatRequest, await self._body(http))
        self._check_model(asked)
        prompt = await self.tokenizer.encode_chat(asked.conversation)
        records = self._records("chatcmpl-", asked, [prompt], asked.wanted_tokens, asked.wanted_logprobs)
        return await self._respond(http, asked, records, ChatShape(asked, records, self.tokenizer.vocabulary))

    async def abort(self, http: Request) -> Response:
        """`POST /v1/abort`: end a request, whoever asked it and wherever it is."""
        asked = parse(AbortRequest, await self._body(http))
        return Response(dumps({"aborted": self.attempts.abort(asked.id)}), media_type="application/json")

    async def _body(self, http: Request) -> bytes:
        limit = self.config.max_body_bytes
        body = bytearray()
        try:
            async with asyncio.timeout(self.config.request_timeout_s):
                async for piece in http.stream():
                    body += piece
                    if len(body) > limit:
                        raise BodyTooLarge(
                            f"the body is over {limit} bytes; send less at once", code="body_too_large"
                        )
        except ClientDisconnect as error:
            raise ClientGone("the client has hung up") from error
        except TimeoutError as error:
            raise DeadlinePassed("the body did not arrive in time; try again") from error
        return bytes(body)

    def _check_model(self, asked: AnswerRequest) -> None:
        if asked.model not in (None, self.config.served_model_name):
            raise NoSuchModel(str(asked.model), self.config.served_model_name)

    async def _prompt_ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return await self.tokenizer.encode(prompt, "prompt")
        foreign = next((id_ for id_ in prompt if not 0 <= id_ < self.tokenizer.vocab_size), None)
        if foreign is not None:
            raise BadRequest(
                f"prompt: token id {foreign} is outside the vocabulary of {self.tokenizer.vocab_size}", param="prompt"
            )
        return prompt

    def _records(
        self, id_prefix: str, asked: AnswerRequest, prompts: list[list[int]], wanted: int | None, logprobs: int | None
    ) -> list[Record]:
        response_id = id_prefix + uuid4().hex
        deadline = time.monotonic() + self.config.request_timeout_s
        records = []
        for index, prompt in enumerate(prompts):
            if not prompt:
                raise BadRequest("the prompt has no tokens; give at least one", param="prompt")
            max_tokens = self.attempts.max_tokens(len(prompt), self.tokenizer.max_context, wanted)
            sampling = asked.sampling(self.tokenizer.defaults, self.tokenizer.eos_ids, max_tokens, logprobs)
            records.append(Record(response_id, index, tuple(prompt), sampling, deadline))
        return records

    async def _respond(self, http: Request, asked: AnswerRequest, records: list[Record], shape: Shape) -> Response:
        inbox = Inbox()
        answers = [Answer(record, self.tokenizer.vocabulary, asked.stops) for record in records]
        pieces = deltas(self.attempts, inbox, answers)
        head = {
            "id": records[0].response_id,
            "object": shape.chunk_object if asked.stream else shape.whole_object,
            "created": int(time.time()),
            "model": self.config.served_model_name,
        }
        headers = {"x-request-id": records[0].response_id}
        if asked.stream:
            events = _events(pieces, Chunks(head), shape, records, asked.include_usage)
            return EventStream(events, inbox, headers, records[0].deadline + _GRACE_S)
        watcher = asyncio.create_task(watch(http.receive, inbox))
        try:
            whole = await _whole(pieces, len(answers))
        finally:
            watcher.cancel()
        choices = [shape.choice(delta) for delta in whole]
        body = {**head, **shape.response_fields(), "choices": choices, "usage": _usage(records)}
        return Response(dumps(body), headers=headers, media_type="application/json")


async def _events(
    pieces: AsyncGenerator[Delta, None], chunks: Chunks, shape: Shape, records: Sequence[Record], include_usage: bool
) -> AsyncGenerator[bytes, None]:
    """The whole stream, one event for each delta."""
    fields = shape.response_fields()
    no_usage = {"usage": None} if include_usage else {}
    async with aclosing(pieces):
        async for delta in pieces:
            yield chunks.event(shape.chunk(delta), **fields, **no_usage)
            fields = {}
    if include_usage:
        yield chunks.usage(_usage(records))
    yield DONE


async def _whole(pieces: AsyncGenerator[Delta, None], count: int) -> list[Delta]:
    """The answers, each in one piece."""
    parts: list[list[Delta]] = [[] for _ in range(count)]
    async with aclosing(pieces):
        async for delta in pieces:
            parts[delta.index].append(delta)
    return [join(part) for part in parts]


def _usage(records: Sequence[Record]) -> dict[str, Any]:
    prompt = sum(len(record.prompt) for record in records)
    answer = sum(len(record.tokens) for record in records)
    cached = sum(record.cached_tokens for record in records)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": answer,
        "total_tokens": prompt + answer,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
