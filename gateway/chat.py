"""`POST /v1/chat/completions`: the shape of its responses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gateway.answers import Delta
from gateway.detokenise import Vocabulary
from gateway.journal import Record
from gateway.logprobs import chat_logprobs
from gateway.openai import ChatRequest


class ChatShape:
    """Chunks and choices of one request's answer."""

    chunk_object = "chat.completion.chunk"
    whole_object = "chat.completion"

    def __init__(self, asked: ChatRequest, records: Sequence[Record], vocabulary: Vocabulary) -> None:
        self._asked = asked
        self._records = records
        self._vocabulary = vocabulary

    def response_fields(self) -> dict[str, Any]:
        """Fields of the whole response, or of the first chunk, beside its choices."""
        return {"prompt_token_ids": self._records[0].prompt} if self._asked.return_token_ids else {}

    def chunk(self, delta: Delta) -> dict[str, Any]:
        """The choice of one chunk of the stream. The first one has the role."""
        role = {"role": "assistant"} if delta.first else {}
        return self._choice("delta", {**role, "content": delta.text}, delta)

    def choice(self, delta: Delta) -> dict[str, Any]:
        """The choice of the whole response; `delta` is the whole answer."""
        return self._choice("message", {"role": "assistant", "content": delta.text}, delta)

    def _choice(self, name: str, said: dict[str, str], delta: Delta) -> dict[str, Any]:
        choice = {
            "index": delta.index,
            name: said,
            "logprobs": chat_logprobs(delta.spoken, self._vocabulary) if self._asked.logprobs else None,
            "finish_reason": delta.finish and delta.finish.value,
        }
        if self._asked.return_token_ids:
            choice["token_ids"] = [token.token_id for token in delta.tokens]
        return choice
