from __future__ import annotations

from itertools import takewhile

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from gateway.detokenise import Vocabulary

SENTENCES = ["the quick brown fox jumps over the lazy dog", "日本語 und émile 🎉", "hello world, how are you?"] * 3


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=340, special_tokens=["<|end|>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(SENTENCES, trainer)
    tokenizer.add_tokens([AddedToken("<tool é>", special=False)])
    return tokenizer


def byte_fallback(strip: bool) -> Tokenizer:
    """As Llama 2's: metaspace, and byte tokens for what the vocabulary lacks."""
    words = ["▁", "▁the", "▁fox", "a", "b", "日", "é", "▁▁", "s"]
    names = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    vocab = {name: at for at, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, *([decoders.Strip(" ", 1, 0)] if strip else [])])
    return tokenizer


def metaspace() -> Tokenizer:
    tokenizer = Tokenizer(
        models.Unigram([(word, -1.0) for word in ["<unk>", "▁", "▁the", "a", "日", "▁▁"]], 0, False)
    )
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def word_pieces() -> Tokenizer:
    vocab = {word: at for at, word in enumerate(["[UNK]", "the", "##s", "fox", "'", "##a", ",", "n't", "."])}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


TOKENIZERS = {
    "byte level": byte_level(),
    "byte fallback": byte_fallback(strip=True),
    "byte fallback, leading space kept": byte_fallback(strip=False),
    "metaspace": metaspace(),
    "word pieces": word_pieces(),
}


def in_pieces(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    text = Vocabulary(tokenizer).detokeniser()
    return [*(text.step(id_) for id_ in ids), text.finish()]


def ids_of(tokenizer: Tokenizer, *names: str) -> list[int]:
    vocabulary = tokenizer.get_vocab()
    return [vocabulary[name] for name in names]


def assert_equals_whole(tokenizer: Tokenizer, ids: list[int]) -> None:
    whole = tokenizer.decode(ids, skip_special_tokens=True)
    got = "".join(in_pieces(tokenizer, ids))
    assert whole.startswith(got)
    missing = whole[len(got) :]
    if missing.strip("\ufffd"):
        # A decoder with byte tokens reads a run of them as a whole, so the last run goes with its last character.
        names = [tokenizer.id_to_token(id_) for id_ in ids]
        last_run = list(
            takewhile(lambda name: name.startswith("<0x"), reversed([n for n in names if n and n != "</s>"]))
        )
        assert missing[-1] == "\ufffd"
        assert len(missing) <= len(last_run)


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data())
def test_random_ids(name: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[name]
    size = tokenizer.get_vocab_size()
    # The last few are words, which random ids of a big vocabulary would seldom hit.
    near_the_end = st.integers(max(0, size - 10), size)
    assert_equals_whole(tokenizer, data.draw(st.lists(st.integers(0, size) | near_the_end, max_size=20)))


@pytest.mark.parametrize("name", ["byte level", "byte fallback, leading space kept"])
@given(text=st.text(max_size=20) | st.text("日é🎉 \n\u200d�ab", max_size=20))
def test_any_text_comes_back_whole(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert_equals_whole(tokenizer, ids)
    if name == "byte level":
        assert "".join(in_pieces(tokenizer, ids)) == text


def test_never_half_a_character() -> None:
    tokenizer = TOKENIZERS["byte level"]
    ids = ids_of(tokenizer, *"ðŁĺĢa")  # the four bytes of one emoji, then a letter
    assert in_pieces(tokenizer, ids) == ["", "", "", "😀", "a", ""]
    assert in_pieces(tokenizer, ids[:3]) == ["", "", "", ""]


def test_run_of_byte_tokens_waits_for_its_end() -> None:
    tokenizer = TOKENIZERS["byte fallback"]
    ids = ids_of(tokenizer, "a", "<0xF0>", "<0x9F>", "<0x98>", "<0x80>", "b")
    assert in_pieces(tokenizer, ids) == ["a", "", "", "", "", "😀b", ""]
    assert in_pieces(tokenizer, ids[:5]) == ["a", "", "", "", "", "😀"]


@pytest.mark.parametrize(
    ("name", "token", "spelled"),
    [
        ("byte level", "Ġ", b" "),
        ("byte level", "ð", b"\xf0"),
        ("byte level", "<|end|>", b"<|end|>"),
        ("byte level", "<tool é>", "<tool é>".encode()),
        ("byte fallback", "<0xF0>", b"\xf0"),
        ("byte fallback", "▁the", b" the"),
        ("metaspace", "▁the", b" the"),
        ("word pieces", "##s", b"s"),
    ],
)
def test_tokens_on_their_own(name: str, token: str, spelled: bytes) -> None:
    tokenizer = TOKENIZERS[name]
    assert Vocabulary(tokenizer).bytes_of(*ids_of(tokenizer, token)) == spelled


def test_id_without_a_token_is_no_text() -> None:
    for tokenizer in TOKENIZERS.values():
        assert in_pieces(tokenizer, [10**6]) == ["", ""]
        assert Vocabulary(tokenizer).bytes_of(10**6) == b""
