"""`POST /v1/completions`: the shape of its responses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gateway.answers import Delta
from gateway.detokenise import Vocabulary
from gateway.journal import Record
from gateway.logprobs import completion_logprobs
from gateway.openai import CompletionRequest


class CompletionShape:
    """Chunks and choices of one request's answers."""

    chunk_object = "text_completion"
    whole_object = "text_completion"

    def __init__(self, asked: CompletionRequest, records: Sequence[Record], vocabulary: Vocabulary) -> None:
        self._asked = asked
        self._records = records
        self._vocabulary = vocabulary
        self._offsets = [0] * len(records)

    def response_fields(self) -> dict[str, Any]:
        """Fields of the whole response beside its choices."""
        return {}

    def chunk(self, delta: Delta) -> dict[str, Any]:
        """The choice of one chunk of the stream."""
        return self._choice(delta, with_prompt=delta.first)

    def choice(self, delta: Delta) -> dict[str, Any]:
        """The choice of the whole response; `delta` is the whole answer."""
        return self._choice(delta, with_prompt=True)

    def _choice(self, delta: Delta, with_prompt: bool) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": delta.index,
            "text": delta.text,
            "logprobs": self._logprobs(delta),
            "finish_reason": delta.finish and delta.finish.value,
        }
        if self._asked.return_token_ids:
            choice["token_ids"] = [token.token_id for token in delta.tokens]
            if with_prompt:
                choice["prompt_token_ids"] = self._records[delta.index].prompt
        return choice

    def _logprobs(self, delta: Delta) -> dict[str, Any] | None:
        if self._asked.logprobs is None:
            return None
        offset = self._offsets[delta.index]
        logprobs = completion_logprobs(delta.spoken, self._vocabulary, offset)
        self._offsets[delta.index] = offset + sum(map(len, logprobs["tokens"]))
        return logprobs
