"""The gateway as its clients see it: a real process, real HTTP, workers that answer by rote."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import openai
import pytest

from tests.integration.gateway_fakes import (
    EOS,
    TEXT,
    FakeWorker,
    Gateway,
    await_workers,
    cancelled,
    error_of,
    events,
    running_gateway,
    write_model,
)
from wire.messages import DecodeTask, Failed, Fault, PrefillTask, Role


class Cell(NamedTuple):
    """A gateway with one prefill and one decode worker."""

    gateway: Gateway
    prefill: FakeWorker
    decode: FakeWorker


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    folder = tmp_path_factory.mktemp("gw")
    tokenizer = write_model(folder)
    with running_gateway(folder) as (url, endpoint, _):
        yield Gateway(url, endpoint, tokenizer)


@pytest.fixture
def cell(gateway: Gateway) -> Iterator[Cell]:
    workers = [FakeWorker(gateway.endpoint, role, gateway.reply) for role in (Role.PREFILL, Role.DECODE)]
    yield Cell(gateway, *workers)
    for worker in workers:
        worker.leave()
    await_workers(gateway.url, 0)


def test_completion_whole(cell: Cell) -> None:
    response = cell.gateway.post("completions", model="tiny", prompt="hello", max_tokens=200, temperature=0)
    body = response.json()
    prompt = cell.gateway.tokenizer.encode("hello").ids
    assert response.status_code == 200
    assert response.headers["x-request-id"] == body["id"]
    assert body["id"].startswith("cmpl-")
    assert body["object"] == "text_completion"
    assert body["choices"] == [{"index": 0, "text": TEXT, "logprobs": None, "finish_reason": "stop"}]
    answered = len(cell.gateway.reply)
    assert body["usage"] == {
        "prompt_tokens": len(prompt), "completion_tokens": answered, "total_tokens": len(prompt) + answered,
        "prompt_tokens_details": {"cached_tokens": 0},
    }  # fmt: skip
    first, second = cell.prefill.await_message(PrefillTask), cell.decode.await_message(DecodeTask)
    assert isinstance(first, PrefillTask)
    assert isinstance(second, DecodeTask)
    assert first.token_ids == tuple(prompt)
    assert (first.decode_worker, first.decode_endpoint) == (cell.decode.hello.worker, cell.decode.hello.peer_endpoint)
    assert (second.prefill_worker, len(second.token_ids)) == (cell.prefill.hello.worker, len(prompt))
    assert first.attempt == second.attempt == f"{body['id']}-0/1"
    assert first.sampling == second.sampling


def test_streams_equal_whole_answers(cell: Cell) -> None:
    asked = {"prompt": "hello", "max_tokens": 200, "logprobs": 2, "return_token_ids": True}
    cell.decode.paced = True
    whole = cell.gateway.post("completions", **asked).json()
    response = cell.gateway.post("completions", **asked, stream=True, stream_options={"include_usage": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    *chunks, last = events(response)
    assert last["choices"] == []
    assert last["usage"] == whole["usage"]
    assert {chunk["id"] for chunk in chunks} == {response.headers["x-request-id"]}
    assert all(chunk["usage"] is None for chunk in chunks)
    (choice,) = whole["choices"]
    pieces = [chunk["choices"][0] for chunk in chunks]
    assert len(pieces) > 1
    assert "".join(piece["text"] for piece in pieces) == choice["text"] == TEXT
    assert [id_ for piece in pieces for id_ in piece["token_ids"]] == choice["token_ids"] == cell.gateway.reply
    assert pieces[0]["prompt_token_ids"] == choice["prompt_token_ids"] == cell.gateway.tokenizer.encode("hello").ids
    assert [piece["finish_reason"] for piece in pieces] == [None] * (len(pieces) - 1) + ["stop"]
    for field, values in choice["logprobs"].items():
        assert [value for piece in pieces for value in piece["logprobs"][field]] == values
        assert len(values) == len(cell.gateway.reply) - 1, "the end token is not part of the text"
    assert choice["logprobs"]["token_logprobs"][:2] == [-0.5, -1.5]
    # A token of half a character is written as U+FFFD, so joined tokens are not always the text.
    assert "".join(choice["logprobs"]["tokens"]).startswith(TEXT.split("🎉")[0])
    assert choice["logprobs"]["text_offset"][1] == len(choice["logprobs"]["tokens"][0])


def test_chat_with_the_official_client(cell: Cell) -> None:
    client = openai.OpenAI(base_url=f"{cell.gateway.url}/v1", api_key="none")
    messages: list[Any] = [{"role": "user", "content": "hello"}]
    asked: dict[str, Any] = {"model": "tiny", "messages": messages, "logprobs": True, "top_logprobs": 2}
    whole = client.chat.completions.create(**asked)
    assert whole.choices[0].message.content == TEXT
    assert whole.choices[0].finish_reason == "stop"
    assert whole.choices[0].logprobs is not None
    content = whole.choices[0].logprobs.content
    assert content is not None
    assert len(content) == len(cell.gateway.reply) - 1
    assert b"".join(bytes(entry.bytes or []) for entry in content).decode() == TEXT
    assert [len(entry.top_logprobs) for entry in content] == [2] * len(content)
    task = cell.prefill.await_message(PrefillTask)
    assert isinstance(task, PrefillTask)
    templated = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert list(task.token_ids) == cell.gateway.tokenizer.encode(templated).ids
    assert task.sampling.max_tokens == 512 - len(task.token_ids), "what is left of the context"
    assert (task.sampling.temperature, task.sampling.top_k, task.sampling.top_p) == (0.6, 20, 0.95)

    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == TEXT
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage == whole.usage


def test_models_with_the_official_client(gateway: Gateway) -> None:
    client = openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none")
    assert [model.id for model in client.models.list()] == ["tiny"]


def test_length_and_ignore_eos(cell: Cell) -> None:
    cell.prefill.reply = cell.decode.reply = [EOS, 5, 6, EOS, 7]
    for stream in (False, True):
        response = cell.gateway.post(
            "completions", prompt=[4, 5], max_tokens=4, ignore_eos=True, return_token_ids=True, stream=stream
        )
        choices = [chunk["choices"][0] for chunk in (events(response) if stream else [response.json()])]
        assert [id_ for choice in choices for id_ in choice["token_ids"]] == [EOS, 5, 6, EOS]
        assert choices[-1]["finish_reason"] == "length"
    task = cell.prefill.await_message(PrefillTask)
    assert isinstance(task, PrefillTask)
    assert task.sampling.stop_token_ids == ()


def test_first_token_may_end_the_request(cell: Cell) -> None:
    cell.prefill.reply = [EOS]
    response = cell.gateway.post("completions", prompt="hello", max_tokens=9)
    assert response.json()["choices"][0]["text"] == ""
    assert response.json()["usage"]["completion_tokens"] == 1
    assert cancelled(cell.decode) == f"{response.json()['id']}-0/1"


def test_stop_string_over_token_borders(cell: Cell) -> None:
    for stream in (False, True):
        response = cell.gateway.post(
            "completions", prompt="hello", max_tokens=200, stop=["zzz", "r the l"], stream=stream
        )
        choices = [chunk["choices"][0] for chunk in (events(response) if stream else [response.json()])]
        assert "".join(choice["text"] for choice in choices) == TEXT.split("r the l")[0]
        assert choices[-1]["finish_reason"] == "stop"
        attempt = f"{response.headers['x-request-id']}-0/1"
        assert cancelled(cell.prefill) == attempt or not stream


def test_batch_of_prompts(cell: Cell) -> None:
    prompts = ["hello", "how are you?", "fox"]
    asked = {"prompt": prompts, "max_tokens": 5, "return_token_ids": True}
    body = cell.gateway.post("completions", **asked).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    encoded = [cell.gateway.tokenizer.encode(prompt).ids for prompt in prompts]
    assert [choice["prompt_token_ids"] for choice in body["choices"]] == encoded
    assert body["usage"]["prompt_tokens"] == sum(map(len, encoded))
    assert body["usage"]["completion_tokens"] == 15
    texts = ["", "", ""]
    for chunk in events(cell.gateway.post("completions", **asked, stream=True)):
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert texts == [choice["text"] for choice in body["choices"]]


def test_colocated_worker_serves_alone(gateway: Gateway) -> None:
    worker = FakeWorker(gateway.endpoint, Role.COLOCATED, gateway.reply)
    assert gateway.post("completions", prompt="hello", max_tokens=200).json()["choices"][0]["text"] == TEXT
    task = worker.await_message(PrefillTask)
    assert isinstance(task, PrefillTask)
    assert (task.decode_worker, task.decode_incarnation, task.decode_endpoint) == ("", "", "")
    worker.leave()
    await_workers(gateway.url, 0)


def test_ready_exactly_when_a_pair_is_there(gateway: Gateway) -> None:
    assert await_workers(gateway.url, 0).status_code == 503
    prefill = FakeWorker(gateway.endpoint, Role.PREFILL, [])
    stranger = FakeWorker(gateway.endpoint, Role.DECODE, [], fingerprint="other")
    response = await_workers(gateway.url, 2)
    assert response.status_code == 503
    assert "fingerprint" in response.json()["reason"]
    assert gateway.post("completions", prompt="x").status_code == 503
    decode = FakeWorker(gateway.endpoint, Role.DECODE, [])
    response = await_workers(gateway.url, 3)
    assert response.status_code == 200
    assert {worker["role"] for worker in response.json()["workers"]} == {"prefill", "decode"}
    decode.leave()
    assert await_workers(gateway.url, 2).status_code == 503
    assert httpx.get(f"{gateway.url}/health").status_code == 200
    prefill.leave()
    stranger.leave()
    await_workers(gateway.url, 0)


@pytest.mark.parametrize(
    ("fault", "status"), [(Fault.REQUEST, 400), (Fault.NO_ROOM, 503), (Fault.OURS, 503)], ids=lambda v: str(v)
)
def test_failures_by_whose_fault(cell: Cell, fault: Fault, status: int) -> None:
    cell.prefill.fault = fault
    cell.decode.pause_at = 0
    for stream in (False, True):
        response = cell.gateway.post("completions", prompt="hello", stream=stream)
        assert response.status_code == status, "nothing has been streamed yet, so the status can tell"
        assert "says no" in error_of(response)["message"]
        assert cancelled(cell.decode)


@contextmanager
def three_tokens_in(cell: Cell, **asked: object) -> Iterator[Iterator[str]]:
    """A stream that has brought three tokens and is stuck there; yields the lines that follow."""
    cell.decode.pause_at = 3
    body = {"prompt": "hello", "max_tokens": 200, "stream": True, "stream_options": {"include_usage": True}, **asked}
    with httpx.stream("POST", f"{cell.gateway.url}/v1/completions", json=body, timeout=30) as response:
        lines = (line for line in response.iter_lines() if line)
        text = ""
        while text != cell.gateway.tokenizer.decode(cell.gateway.reply[:3]):
            text += json.loads(next(lines).removeprefix("data: "))["choices"][0]["text"]
        yield lines


def lose(worker: FakeWorker, how: str) -> None:
    if how == "silence":
        worker.mute = True
    else:
        worker.leave()


@pytest.mark.parametrize("how", ["silence", "bye"])
def test_worker_death_in_mid_stream_and_nobody_to_go_on(cell: Cell, how: str) -> None:
    with three_tokens_in(cell) as lines:
        lose(cell.decode, how)
        (rest,) = lines
    error = json.loads(rest.removeprefix("data: "))["error"]
    assert error["type"] == "service_unavailable"
    assert cell.decode.hello.worker in error["message"]
    assert cancelled(cell.prefill)


@pytest.mark.parametrize("how", ["silence", "bye", "new incarnation", "given back", "failure"])
@pytest.mark.parametrize("stop", [None, "dog"])
def test_a_lost_attempt_is_replayed_and_the_stream_bears_no_mark(cell: Cell, how: str, stop: str | None) -> None:
    spare: FakeWorker | None = None
    with three_tokens_in(cell, stop=stop, logprobs=0) as lines:
        task = cell.decode.await_message(DecodeTask)
        assert isinstance(task, DecodeTask)
        name = cell.decode.hello.worker if how == "new incarnation" else None
        spare = FakeWorker(cell.gateway.endpoint, Role.DECODE, cell.gateway.reply, name=name or "")
        if how in ("silence", "bye"):
            lose(cell.decode, how)
        elif how != "new incarnation":
            fault = Fault.LEAVING if how == "given back" else Fault.OURS
            cell.decode.say(Failed(task.attempt, fault, "no more"))
        chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line != "data: [DONE]"]
    choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
    rest = "".join(choice["text"] for choice in choices)
    before = cell.gateway.tokenizer.decode(cell.gateway.reply[:3])
    assert before + rest == (TEXT if stop is None else TEXT[: TEXT.index("dog")])
    assert choices[-1]["finish_reason"] == "stop"
    logprobs = [value for choice in choices for value in choice["logprobs"]["token_logprobs"]]
    assert logprobs == [-0.5 - 3 - n for n in range(len(logprobs))]
    second = spare.await_message(DecodeTask)
    assert isinstance(second, DecodeTask)
    assert second.attempt != task.attempt
    assert second.token_ids == (*task.token_ids, *cell.gateway.reply[:3])
    assert (second.generated, second.sampling) == (3, task.sampling)
    usage = chunks[-1]["usage"]
    assert usage["prompt_tokens"] == len(task.token_ids)
    assert usage["completion_tokens"] == (len(cell.gateway.reply) if stop is None else 3 + len(logprobs))
    spare.leave()


@pytest.mark.parametrize("stream", [True, False])
def test_an_abort_ends_a_request_everywhere(cell: Cell, stream: bool) -> None:
    cell.decode.pause_at = 3
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(cell.gateway.post, "completions", prompt="hello", max_tokens=50, stream=stream)
        task = cell.decode.await_message(DecodeTask)
        assert isinstance(task, DecodeTask)
        id_ = task.attempt.rpartition("-")[0]
        state = httpx.get(f"{cell.gateway.url}/debug/state").json()
        assert [item["id"] for item in state["open"]] == [f"{id_}-0"]
        assert len(state["workers"]) == 2
        assert httpx.post(f"{cell.gateway.url}/v1/abort", json={"id": "cmpl-other"}).json() == {"aborted": False}
        assert httpx.post(f"{cell.gateway.url}/v1/abort", json={"id": id_}).json() == {"aborted": True}
        response = asked.result(20)
    assert "was aborted" in response.text
    assert cancelled(cell.decode) == cancelled(cell.prefill) == task.attempt
    assert httpx.get(f"{cell.gateway.url}/debug/state").json()["open"] == []
    assert httpx.post(f"{cell.gateway.url}/v1/abort", json={"id": 5}).status_code == 400


def test_an_api_key_keeps_strangers_out(tmp_path: Path) -> None:
    write_model(tmp_path)
    with running_gateway(tmp_path, api_key="sesame") as (url, _, _):
        assert httpx.get(f"{url}/health").status_code == 200
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "sesame"}):
            for path in ("/v1/models", "/debug/state", "/debug/requests"):
                response = httpx.get(f"{url}{path}", headers=headers)
                assert response.status_code == 401
                assert response.json()["error"]["type"] == "authentication_error"
            assert httpx.post(f"{url}/v1/completions", json={"prompt": "x"}, headers=headers).status_code == 401
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=f"{url}/v1", api_key="wrong").models.list()
        assert openai.OpenAI(base_url=f"{url}/v1", api_key="sesame").models.list().data[0].id == "tiny"


def test_attempts_are_bounded(cell: Cell) -> None:
    cell.decode.fault = Fault.OURS
    cell.prefill.pause_at = 0
    response = cell.gateway.post("completions", prompt="hello")
    assert response.status_code == 503
    assert "4 attempts have failed" in error_of(response)["message"]
    assert "says no" in error_of(response)["message"]
    attempts = [cell.decode.await_message(DecodeTask) for _ in range(4)]
    assert len({task.attempt for task in attempts if isinstance(task, DecodeTask)}) == 4


@pytest.mark.parametrize("stream", [True, False])
def test_client_that_hangs_up_is_noticed(cell: Cell, stream: bool) -> None:
    cell.decode.pause_at = 3
    host, port = cell.gateway.url.removeprefix("http://").split(":")
    body = json.dumps({"prompt": "hello", "max_tokens": 50, "stream": stream}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(head + body)
        task = cell.decode.await_message(DecodeTask)
        assert isinstance(task, DecodeTask)
    assert cancelled(cell.decode) == cancelled(cell.prefill) == task.attempt


def test_fifty_streams_at_once(cell: Cell) -> None:
    def one(number: int) -> str:
        response = cell.gateway.post("completions", prompt=[number + 3], max_tokens=200, stream=True)
        return "".join(chunk["choices"][0]["text"] for chunk in events(response))

    with ThreadPoolExecutor(50) as pool:
        assert set(pool.map(one, range(50))) == {TEXT}


@pytest.mark.parametrize(
    ("route", "body", "status", "param", "words"),
    [
        ("completions", {"prompt": "x", "model": "gpt"}, 404, "model", "'gpt'"),
        ("completions", {"prompt": "x", "n": 2}, 400, "n", "not supported"),
        ("completions", {"prompt": ""}, 400, "prompt", "empty"),
        ("completions", {"prompt": [1, 10**6]}, 400, "prompt", "1000000"),
        ("completions", {"prompt": [1, -1]}, 400, "prompt", "-1"),
        ("completions", {"prompt": "\ud800"}, 400, "prompt", "half a character"),
        ("completions", {"prompt": "x", "max_tokens": 600}, 400, "max_tokens", "512"),
        ("completions", {"prompt": [5] * 512}, 400, None, "512"),
        ("chat/completions", {"messages": [{"role": "alien", "content": "x"}]}, 400, "messages", "no aliens"),
        ("chat/completions", {"messages": [{"role": "user", "content": 5}]}, 400, "messages.0.content", "text"),
        ("nothing", {}, 404, None, "/v1/nothing"),
    ],
)
def test_requests_that_cannot_be_served(
    cell: Cell, route: str, body: dict[str, Any], status: int, param: str | None, words: str
) -> None:
    # json.dumps, and not httpx, writes the lone surrogate as an escape.
    response = httpx.post(f"{cell.gateway.url}/v1/{route}", content=json.dumps(body))
    error = error_of(response)
    assert response.status_code == status
    assert error["param"] == param
    assert words in error["message"]
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"prompt": "x", "temperature": NaN}', b"[" * 100_000, b"\xff"])
def test_bodies_that_are_no_json_objects(gateway: Gateway, body: bytes) -> None:
    response = httpx.post(f"{gateway.url}/v1/completions", content=body)
    assert response.status_code == 400
    assert error_of(response)["code"] == "invalid_json"


def test_wrong_method(gateway: Gateway) -> None:
    response = httpx.get(f"{gateway.url}/v1/completions")
    assert response.status_code == 405
    assert response.headers["allow"] == "POST"
    error_of(response)


def test_capacity_of_the_workers_counts(gateway: Gateway) -> None:
    prefill = FakeWorker(gateway.endpoint, Role.PREFILL, [5] * 99, holds=20)
    decode = FakeWorker(gateway.endpoint, Role.DECODE, [5] * 99, holds=30)
    assert "20 tokens" in error_of(gateway.post("completions", prompt=[5] * 21, max_tokens=1))["message"]
    assert "30 tokens" in error_of(gateway.post("completions", prompt=[5] * 20, max_tokens=11))["message"]
    assert gateway.post("completions", prompt=[5] * 20, max_tokens=10).status_code == 200
    body = gateway.post("chat/completions", messages=[{"role": "user", "content": ""}]).json()
    assert body["usage"]["total_tokens"] == 30
    for worker in (prefill, decode):
        worker.leave()
    await_workers(gateway.url, 0)


def test_limits_deadline_and_shutdown(tmp_path: Path) -> None:
    tokenizer = write_model(tmp_path)
    settings = {"max_queue": 1, "max_body_bytes": 2000, "request_timeout_s": 2.0}
    with running_gateway(tmp_path, **settings) as (url, endpoint, process):
        gateway = Gateway(url, endpoint, tokenizer)
        workers = [FakeWorker(endpoint, role, gateway.reply) for role in (Role.PREFILL, Role.DECODE)]
        too_large = gateway.post("completions", prompt="x" * 2000)
        assert (too_large.status_code, error_of(too_large)["code"]) == (413, "body_too_large")
        assert error_of(gateway.post("completions", prompt=["a", "b"]))["param"] == "prompt"
        workers[1].pause_at = 3
        with ThreadPoolExecutor(1) as pool:
            late = pool.submit(gateway.post, "completions", prompt="a", max_tokens=50)
            workers[1].await_message(DecodeTask)
            full = gateway.post("completions", prompt="b")
            assert (full.status_code, full.headers["retry-after"]) == (429, "1")
            assert late.result().status_code == 504
        assert cancelled(workers[0]) == cancelled(workers[1])
        with httpx.stream("POST", f"{url}/v1/completions", json={"prompt": "a", "stream": True}) as response:
            lines = (line for line in response.iter_lines() if line)
            assert "choices" in next(lines)
            process.terminate()
            *_, last = lines
        assert "stopping" in json.loads(last.removeprefix("data: "))["error"]["message"]
        assert process.wait(20) == 0
        assert process.stdout is not None
        assert process.stdout.read() == "False\n", "torch has been imported, or something was printed"
        for worker in workers:
            worker.leave()


def test_port_that_is_taken_is_one_clear_error(tmp_path: Path) -> None:
    write_model(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code = (
            "from pathlib import Path\nfrom gateway.config import GatewayConfig\nfrom gateway.server import run\n"
            f"run(GatewayConfig(Path({str(tmp_path)!r}), 'tiny', 'ipc://{tmp_path}/c', port={port}), print)"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode != 0
    assert done.stderr.splitlines()[-1].startswith("gateway.errors.StartError")
    assert f"127.0.0.1:{port}" in done.stderr
