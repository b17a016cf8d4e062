"""Log-probabilities as OpenAI's two APIs shape them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gateway.detokenise import Vocabulary
from wire.messages import Token

_LEAST = -9999.0
"""Stands for minus infinity, which JSON does not have."""


def chat_logprobs(tokens: Sequence[Token], vocabulary: Vocabulary) -> dict[str, Any]:
    """The `logprobs` of a chat choice: one entry a token."""

    def entry(token_id: int, logprob: float | None) -> dict[str, Any]:
        spelled = vocabulary.bytes_of(token_id)
        return {"token": _text(spelled), "logprob": _finite(logprob), "bytes": list(spelled)}

    return {
        "content": [
            entry(token.token_id, token.logprob)
            | {"top_logprobs": [entry(*alternative) for alternative in token.top]}
            for token in tokens
        ]
    }


def completion_logprobs(tokens: Sequence[Token], vocabulary: Vocabulary, offset: int) -> dict[str, Any]:
    """The `logprobs` of a completion choice. `offset`: the letters of the answer's tokens before these.

    `top_logprobs` always has the chosen token too, as with OpenAI.
    """
    texts = [_text(vocabulary.bytes_of(token.token_id)) for token in tokens]
    offsets = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    tops = []
    for token, text in zip(tokens, texts, strict=True):
        top = {_text(vocabulary.bytes_of(id_)): _finite(logprob) for id_, logprob in token.top}
        tops.append({text: _finite(token.logprob)} | top)
    return {
        "tokens": texts,
        "token_logprobs": [_finite(token.logprob) for token in tokens],
        "top_logprobs": tops,
        "text_offset": offsets,
    }


def _text(spelled: bytes) -> str:
    return spelled.decode("utf-8", "replace")


def _finite(logprob: float | None) -> float:
    return logprob if logprob is not None and logprob > _LEAST else _LEAST
