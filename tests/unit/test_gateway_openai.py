from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.errors import BadRequest
from gateway.openai import ChatRequest, CompletionRequest, parse
from gateway.tokenizer import Defaults

DEFAULTS = Defaults(temperature=0.6, top_p=0.9, top_k=20)
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}


def completion(**fields: object) -> CompletionRequest:
    return parse(CompletionRequest, json.dumps({"prompt": "hi", **fields}).encode())


def chat(**fields: object) -> ChatRequest:
    return parse(ChatRequest, json.dumps({**CHAT, **fields}).encode())


COMMON: list[tuple[str, object]] = [
    ("model", 5),
    ("stream", "yes"),
    ("stream", 1),
    ("stream_options", {"include_usage": "yes"}),
    ("temperature", -0.1),
    ("temperature", 2.1),
    ("temperature", "0.5"),
    ("temperature", True),
    ("temperature", 1e999),
    ("top_p", 0),
    ("top_p", 1.1),
    ("top_k", -2),
    ("top_k", 1.5),
    ("max_tokens", 0),
    ("max_tokens", "5"),
    ("max_tokens", 2**31),
    ("stop", ""),
    ("stop", ["a", ""]),
    ("stop", ["a"] * 17),
    ("stop", 5),
    ("seed", 2**63),
    ("seed", 1.5),
    ("ignore_eos", 1),
    ("return_token_ids", "true"),
    ("n", 2),
    ("presence_penalty", 0.5),
    ("tools", [{"type": "function"}]),
    ("response_format", {"type": "json_object"}),
    ("min_p", 0.1),
    ("repetition_penalty", 1.2),
    ("guided_json", {}),
]


@pytest.mark.parametrize(("field", "value"), COMMON)
def test_bad_values_are_refused_by_name(field: str, value: object) -> None:
    body = json.dumps({field: value}).replace("Infinity", "1e999").encode()
    for kind, needed in ((CompletionRequest, {"prompt": "hi"}), (ChatRequest, CHAT)):
        with pytest.raises(BadRequest) as caught:
            parse(kind, b'{"extra": 1, ' + json.dumps(needed).encode()[1:-1] + b", " + body[1:])
        assert caught.value.param == field
        assert field in caught.value.text


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("prompt", 5),
        ("prompt", None),
        ("prompt", ["a", 5]),
        ("prompt", [1, 2.5]),
        ("prompt", [True]),
        ("prompt", [[1], ["a"]]),
        ("prompt", ""),
        ("prompt", []),
        ("prompt", [[]]),
        ("prompt", ["a", ""]),
        ("logprobs", 21),
        ("logprobs", True),
        ("echo", True),
        ("best_of", 3),
        ("suffix", "end"),
    ],
)
def test_bad_completions(field: str, value: object) -> None:
    with pytest.raises(BadRequest) as caught:
        _ = completion(**{field: value}).prompts
    assert caught.value.param == field
    assert field in caught.value.text


@pytest.mark.parametrize(
    ("field", "value", "param"),
    [
        ("messages", [], "messages"),
        ("messages", "hi", "messages"),
        ("messages", ["hi"], "messages"),
        ("messages", [{"content": "hi"}], "messages.0.role"),
        ("messages", [{"role": "user", "content": 5}], "messages.0.content"),
        ("messages", [{"role": "user", "content": [{"type": "image_url"}]}], "messages.0.content"),
        ("messages", [{"role": "user", "content": [{"type": "text", "text": 5}]}], "messages.0.content"),
        ("logprobs", 1, "logprobs"),
        ("top_logprobs", 21, "top_logprobs"),
        ("max_completion_tokens", 0, "max_completion_tokens"),
    ],
)
def test_bad_chats(field: str, value: object, param: str) -> None:
    with pytest.raises(BadRequest) as caught:
        _ = chat(**{field: value}).conversation
    assert caught.value.param == param
    assert param in caught.value.text


@pytest.mark.parametrize("missing", [CompletionRequest, ChatRequest])
def test_what_is_missing_is_named(missing: type[CompletionRequest] | type[ChatRequest]) -> None:
    with pytest.raises(BadRequest, match=r"^(prompt|messages): "):
        parse(missing, b"{}")


def test_null_means_the_default() -> None:
    nothing = dict.fromkeys(["temperature", "top_p", "top_k", "max_tokens", "stop", "seed", "n", "logprobs"])
    asked = completion(**nothing)
    sampling = asked.sampling(DEFAULTS, (2,), 16, asked.logprobs)
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.6, 0.9, 20)
    assert (sampling.stop_token_ids, sampling.logprobs) == ((2,), None)
    assert asked.stops == []
    assert asked.wanted_tokens == 16
    assert chat().wanted_tokens is None


def test_given_values_win() -> None:
    asked = completion(temperature=0, top_p=0.5, top_k=-1, seed=7, ignore_eos=True, stop="x", max_tokens=3, unknown=1)
    sampling = asked.sampling(DEFAULTS, (2,), 3, asked.logprobs)
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (0.0, 0.5, 0, 7)
    assert sampling.stop_token_ids == ()
    assert asked.stops == ["x"]
    assert chat(max_tokens=5, max_completion_tokens=6).wanted_tokens == 6
    assert [chat(logprobs=True, top_logprobs=3).wanted_logprobs, chat(logprobs=True).wanted_logprobs] == [3, 0]
    assert chat(top_logprobs=3).wanted_logprobs is None


def test_a_seed_is_drawn_when_none_is_given() -> None:
    seeds = {completion().sampling(DEFAULTS, (), 1, None).seed for _ in range(8)}
    assert len(seeds) == 8
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert completion(seed=-5).sampling(DEFAULTS, (), 1, None).seed == 2**63 - 5


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ["a"]),
        ([1, 2], [[1, 2]]),
        (["a", "b"], ["a", "b"]),
        ([[1], [2, 3]], [[1], [2, 3]]),
    ],
)
def test_prompts_of_all_four_kinds(prompt: object, prompts: object) -> None:
    assert completion(prompt=prompt).prompts == prompts


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    asked = chat(messages=[{"role": "user", "content": parts, "name": "x"}, {"role": "assistant", "content": None}])
    assert asked.conversation == [
        {"role": "user", "content": "ab", "name": "x"},
        {"role": "assistant", "content": ""},
    ]


@pytest.mark.parametrize("body", [b"", b"[]", b"nul", b'{"temperature": NaN}', b'{"x": -Infinity}', b"[" * 99_999])
def test_what_is_no_json_object(body: bytes) -> None:
    with pytest.raises(BadRequest) as caught:
        parse(CompletionRequest, body)
    assert caught.value.code == "invalid_json"
