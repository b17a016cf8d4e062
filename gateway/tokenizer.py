"""Text to token ids: what the gateway knows of a model from its folder, without its weights.

`PreTrainedTokenizerFast` is imported by its own name and not through `AutoTokenizer`, which loads torch: 1.0 s and
59 MB instead of 3.6 s and 245 MB. It reads the same tokenizer.json and renders chat templates with the same code.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerFast

from gateway.detokenise import Vocabulary
from gateway.errors import BadRequest, StartError

_LONG_TEXT = 20_000
"""Letters from which on encoding goes to a thread, so that other clients' tokens do not wait for it."""


@dataclass(frozen=True, slots=True)
class Defaults:
    """What sampling does when a request does not say."""

    temperature: float
    top_p: float
    top_k: int


class Tokenizer:
    """A model's tokenizer and what else requests need to know of the model.

    `eos_ids`: the tokens that end an answer. `max_context`: tokens; None when the model has no limit of its own.
    Raises StartError when the folder is not a model's.
    """

    def __init__(self, model_path: Path) -> None:
        if not (model_path / "tokenizer.json").is_file():
            raise StartError(
                f"{model_path} has no tokenizer.json; save the model's tokenizer there with "
                "AutoTokenizer.from_pretrained(...).save_pretrained(...)"
            )
        config = _read(model_path / "config.json")
        config = config | config.get("text_config", {})
        generation = _read(model_path / "generation_config.json")
        self._pretrained = PreTrainedTokenizerFast.from_pretrained(str(model_path))
        self._backend = self._pretrained.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        self.vocabulary = Vocabulary(self._backend)
        self.vocab_size: int = config.get("vocab_size") or len(self._pretrained)
        self.max_context: int | None = config.get("max_position_embeddings")
        self.eos_ids = _eos_ids(generation, config, {"eos_token_id": self._pretrained.eos_token_id})
        self.defaults = _defaults(generation)

    async def encode(self, text: str, param: str, *, special: bool = True) -> list[int]:
        """The ids of a text, with what the tokenizer puts around it unless `special` is False."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise BadRequest(f"{param} holds half a character: {error}", param=param) from error
        if len(text) < _LONG_TEXT:
            return self._encode(text, special)
        return await asyncio.to_thread(self._encode, text, special)

    def _encode(self, text: str, special: bool) -> list[int]:
        ids: list[int] = self._backend.encode(text, add_special_tokens=special).ids
        return ids

    async def encode_chat(self, messages: list[dict[str, Any]]) -> list[int]:
        """The ids of a conversation up to where the assistant's next message begins."""
        if self._pretrained.chat_template is None:
            raise BadRequest("this model has no chat template; use /v1/completions instead", param="messages")
        try:
            text = self._pretrained.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            raise BadRequest(f"messages do not fit the model's chat template: {error}", param="messages") from error
        return await self.encode(str(text), "messages", special=False)


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise StartError(f"{path} is not JSON: {error}; download it again") from error
    if not isinstance(content, dict):
        raise StartError(f"{path} holds no JSON object; download it again")
    return content


def _eos_ids(*sources: Mapping[str, Any]) -> tuple[int, ...]:
    """All end-of-sequence ids that any of the sources names; each names one, several or none."""
    ids: set[int] = set()
    for source in sources:
        named = source.get("eos_token_id")
        ids.update(named if isinstance(named, list) else [] if named is None else [named])
    return tuple(sorted(ids))


def _defaults(generation: Mapping[str, Any]) -> Defaults:
    """The model's own, where it means them (`do_sample`), else OpenAI's."""
    own = generation if generation.get("do_sample") else {}
    return Defaults(own.get("temperature") or 1.0, own.get("top_p") or 1.0, own.get("top_k") or 0)
