"""What clients may ask: OpenAI's request bodies, checked field by field.

Fields that are not known here are ignored, as OpenAI's clients expect. Fields that are known, are not supported
and would change the answer are refused (`_NEUTRAL`), so that nobody gets something else than was asked for.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gateway.errors import BadRequest
from gateway.tokenizer import Defaults
from wire.messages import Sampling

# A list is as long as the body allows; the first error in it is enough.
Ids = Annotated[list[int], Field(fail_fast=True)]
Prompt = str | Ids
Stop = Annotated[str, Field(min_length=1)]

_SEEDS = 1 << 63
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "n": (None, 1),
    "best_of": (None, 1),
    "echo": (None, False),
    "suffix": (None, ""),
    "logit_bias": (None, {}),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "tools": (None, []),
    "functions": (None, []),
    "response_format": (None, {"type": "text"}),
    # Fields of other servers, which their users expect to work.
    "min_p": (None, 0),
    "repetition_penalty": (None, 1),
    "min_tokens": (None, 0),
    "stop_token_ids": (None, []),
    "include_stop_str_in_output": (None, False),
    "use_beam_search": (None, False),
    "prompt_logprobs": (None, 0),
    **dict.fromkeys(
        ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs", "regex", "ebnf"),
        (None,),
    ),
}
_REASONS: Mapping[str, str] = {
    "prompt": "must be a text, a list of texts, a list of token ids or a list of lists of token ids",
    "stop": "must be a text or a list of up to 16 texts, none of them empty",
}


class StreamOptions(BaseModel):
    """What the stream carries besides the answer."""

    model_config = ConfigDict(strict=True)

    include_usage: bool = False


class AnswerRequest(BaseModel):
    """What both kinds of request share."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, lt=1 << 31)
    max_tokens: int | None = Field(None, ge=1, lt=1 << 31)
    stop: Stop | Annotated[list[Stop], Field(max_length=16)] | None = None
    seed: int | None = Field(None, ge=-_SEEDS, lt=_SEEDS)
    ignore_eos: bool = False
    return_token_ids: bool = False

    @property
    def stops(self) -> list[str]:
        """The stop strings."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def include_usage(self) -> bool:
        """Whether the stream ends with the usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling(
        self, defaults: Defaults, eos_ids: tuple[int, ...], max_tokens: int, logprobs: int | None
    ) -> Sampling:
        """How to choose tokens, with the model's defaults where the request says nothing."""
        top_k = defaults.top_k if self.top_k is None else self.top_k
        return Sampling(
            temperature=defaults.temperature if self.temperature is None else self.temperature,
            top_p=defaults.top_p if self.top_p is None else self.top_p,
            top_k=max(top_k, 0),
            seed=secrets.randbelow(_SEEDS) if self.seed is None else self.seed % _SEEDS,
            max_tokens=max_tokens,
            stop_token_ids=() if self.ignore_eos else eos_ids,
            logprobs=logprobs,
        )


class CompletionRequest(AnswerRequest):
    """`POST /v1/completions`. The prompt is a text, its token ids, or a list of either."""

    prompt: str | Ids | Annotated[list[str], Field(fail_fast=True)] | Annotated[list[Ids], Field(fail_fast=True)]
    logprobs: int | None = Field(None, ge=0, le=20)

    @property
    def wanted_tokens(self) -> int:
        """The most tokens to answer with; OpenAI's default is 16."""
        return self.max_tokens or 16

    @property
    def prompts(self) -> list[Prompt]:
        """The prompts, at least one. Raises BadRequest when there is none or one is empty."""
        single = isinstance(self.prompt, str) or not self.prompt or isinstance(self.prompt[0], int)
        prompts: list[Any] = [self.prompt] if single else list(self.prompt)
        for prompt in prompts:
            if not prompt:
                raise BadRequest("prompt is empty; give at least one token", param="prompt")
        return prompts


class ChatRequest(AnswerRequest):
    """`POST /v1/chat/completions`. Messages go to the model's chat template as they are, their text parts joined."""

    messages: Annotated[list[dict[str, Any]], Field(fail_fast=True)] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1, lt=1 << 31)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=20)

    @property
    def wanted_logprobs(self) -> int | None:
        """How many alternatives to report with each token; None for no log-probabilities."""
        return self.top_logprobs or 0 if self.logprobs else None

    @property
    def wanted_tokens(self) -> int | None:
        """The most tokens to answer with; None for what is left of the context."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def conversation(self) -> list[dict[str, Any]]:
        """The messages with plain text. Raises BadRequest for a message without a role or with other than text."""
        return [self._plain(message, f"messages.{at}") for at, message in enumerate(self.messages)]

    def _plain(self, message: dict[str, Any], where: str) -> dict[str, Any]:
        if not isinstance(message.get("role"), str):
            raise BadRequest(f"{where}.role must be a text such as 'user'", param=f"{where}.role")
        content = message.get("content")
        if content is None or isinstance(content, str):
            return {**message, "content": content or ""}
        parts = content if isinstance(content, list) else [content]
        texts = [part.get("text") for part in parts if isinstance(part, dict) and part.get("type") == "text"]
        if len(texts) < len(parts) or not all(isinstance(text, str) for text in texts):
            raise BadRequest(
                f"{where}.content must be a text or a list of parts of type 'text'", param=f"{where}.content"
            )
        return {**message, "content": "".join(map(str, texts))}


class AbortRequest(BaseModel):
    """`POST /v1/abort`: the id that the response, or its `x-request-id`, carries."""

    model_config = ConfigDict(strict=True)

    id: Annotated[str, Field(min_length=1, max_length=200)]


Request = TypeVar("Request", bound=BaseModel)


def parse(kind: type[Request], body: bytes) -> Request:
    """The request in `body`. Raises BadRequest, naming the field that is at fault."""
    fields = _json(body)
    for name, neutral in _NEUTRAL.items():
        if (given := fields.get(name)) not in neutral:
            raise BadRequest(f"{name} {str(given)[:80]!r} is not supported; leave it out", param=name)
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        # Past the field's own name, `loc` lists the types that a union tried: of no use to the client.
        param = str(first["loc"][0])
        value = "" if first["type"] == "missing" else f", not {str(first['input'])[:80]!r}"
        reason = _REASONS.get(param, first["msg"])
        raise BadRequest(f"{param}: {reason}{value}", param=param) from error


def _json(body: bytes) -> dict[str, Any]:
    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    try:
        fields = json.loads(body, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body is not JSON: {error}", code="invalid_json") from error
    if not isinstance(fields, dict):
        raise BadRequest("the body must be a JSON object", code="invalid_json")
    return fields
