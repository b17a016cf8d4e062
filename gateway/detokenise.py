"""Token ids to text, one at a time and never half a character.

What a `Detokeniser` returns, laid end to end, is the tokenizer's own decoding of all ids (special tokens skipped),
save that an incomplete character at the very end is left out. There are two, because decoders are of two kinds:

* byte-level ones map every token to bytes of its own: the bytes go through an incremental UTF-8 decoder;
* all others go through `tokenizers.decoders.DecodeStream`. It gives up on a run of byte tokens (`<0x0A>`) that is no
  valid UTF-8, since one more byte changes how the whole run reads: so a run is held until something else follows,
  and left out when the answer ends with it and it ends with half a character.
"""

from __future__ import annotations

import codecs
from typing import Protocol

from tokenizers import Tokenizer, decoders


class Detokeniser(Protocol):
    """The text of one answer."""

    def step(self, token_id: int) -> str:
        """The text that this token completes."""
        ...

    def finish(self) -> str:
        """The text that was held back for what might have followed."""
        ...


class Vocabulary:
    """Which token is which piece of text; makes detokenisers."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._byte_level = isinstance(tokenizer.decoder, decoders.ByteLevel)
        self._byte_of = _byte_level_alphabet()
        named = [(tokenizer.token_to_id(f"<0x{byte:02X}>"), byte) for byte in range(256)]
        self._byte_tokens = {id_: byte for id_, byte in named if id_ is not None}
        self._special = {id_ for id_, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        self._bytes: dict[int, bytes] = {}

    def detokeniser(self) -> Detokeniser:
        """A fresh one, for one answer."""
        return _ByteLevelText(self) if self._byte_level else _DecodedText(self._tokenizer, self)

    def is_special(self, token_id: int) -> bool:
        """Whether the token stands for no text."""
        return token_id in self._special

    def is_byte(self, token_id: int) -> bool:
        """Whether the token is a byte token, such as `<0x0A>`."""
        return token_id in self._byte_tokens

    def bytes_of(self, token_id: int) -> bytes:
        """The token on its own, as UTF-8 or a part of it; special tokens by their names, unknown ids as nothing."""
        if (known := self._bytes.get(token_id)) is None:
            known = self._bytes[token_id] = self._spell(token_id)
        return known

    def _spell(self, token_id: int) -> bytes:
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if self._byte_level:
            letters = [self._byte_of.get(letter) for letter in token]
            return token.encode() if None in letters else bytes(letter for letter in letters if letter is not None)
        if token_id in self._byte_tokens:
            return bytes([self._byte_tokens[token_id]])
        # A decoder may treat the first token of a text in its own way (drop a space): ask for the second.
        once = self._tokenizer.decode([token_id], skip_special_tokens=False)
        return self._tokenizer.decode([token_id, token_id], skip_special_tokens=False)[len(once) :].encode()


class _ByteLevelText:
    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def step(self, token_id: int) -> str:
        if self._vocabulary.is_special(token_id):
            return ""
        return self._decoder.decode(self._vocabulary.bytes_of(token_id))

    def finish(self) -> str:
        return ""


class _DecodedText:
    def __init__(self, tokenizer: Tokenizer, vocabulary: Vocabulary) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._stream = decoders.DecodeStream(skip_special_tokens=True)
        self._run: list[int] = []

    def step(self, token_id: int) -> str:
        if self._vocabulary.is_special(token_id) or self._tokenizer.id_to_token(token_id) is None:
            return ""  # and no end of a run either
        self._run.append(token_id)
        return "" if self._vocabulary.is_byte(token_id) else self.finish()

    def finish(self) -> str:
        run, self._run = self._run, []
        return (self._stream.step(self._tokenizer, run) or "") if run else ""


def _byte_level_alphabet() -> dict[str, int]:
    """Letter → byte, as GPT-2 defined it: printable Latin-1 stands for itself, the rest follows from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}
