"""Workers that are killed and stopped while they serve: clients see the right tokens, and nothing else."""

from __future__ import annotations

import json
import random
import signal
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fleet import MARGIN
from tests.integration.gateway_fakes import write_model
from tests.served import Served, served, wait_for
from tests.tiny import VOCAB, make_checkpoint

PATIENCE_S = 120.0
CLIENTS = 10


def canary(number: int) -> dict[str, Any]:
    """A request whose right answer is known from a calm run. `number` decides on all of it."""
    source = random.Random(number)
    return {
        "prompt": [source.randrange(VOCAB) for _ in range(source.choice([1, 7, 30, 90]))],
        "max_tokens": source.choice([2, 20, 60]),
        "temperature": 0 if number % 3 else 0.9,
        "seed": number,
        "logprobs": 2,
        "ignore_eos": True,
        "stream": bool(number % 2),
        "stream_options": {"include_usage": True} if number % 2 else None,
        "return_token_ids": True,
    }


def ask(url: str, number: int) -> list[tuple[int, float]]:
    """(token, margin to the second best) of the answer. Fails on any error and on a stream that is not whole."""
    body = {name: value for name, value in canary(number).items() if value is not None}
    response = httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE_S)
    while response.status_code == 503 and response.json()["error"]["code"] == "not_ready":
        time.sleep(float(response.headers["retry-after"]))  # what a client is asked to do while there is no pair
        response = httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE_S)
    assert response.status_code == 200, response.text
    if body["stream"]:
        *lines, done = [line for line in response.text.split("\n\n") if line]
        assert done == "data: [DONE]", response.text[-300:]
        chunks = [json.loads(line.removeprefix("data: ")) for line in lines]
    else:
        chunks = [response.json()]
    assert all("error" not in chunk for chunk in chunks), chunks[-1]
    choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
    tokens = [token for choice in choices for token in choice["token_ids"]]
    tops = [list(top.values()) for choice in choices for top in choice["logprobs"]["top_logprobs"]]
    assert chunks[-1]["usage"]["completion_tokens"] == len(tokens) == body["max_tokens"]
    return [(token, top[0] - top[1] if len(top) > 1 else 0.0) for token, top in zip(tokens, tops, strict=True)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    vocabulary = write_model(folder).get_vocab_size()
    return make_checkpoint("qwen3_5_text", folder, vocab_size=vocabulary, max_position_embeddings=512)


@pytest.fixture(scope="module")
def stormy(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(
        tmp_path_factory.mktemp("run"), str(checkpoint), "--prefill", "2", "--decode", "2", "--memory", "64MiB",
        "--reserve", "1MiB", "--max-context", "200", "--chunk-size", "32", "--page-size", "8",
        "--max-running-requests", "4", "--silence", "3", "--retries", "20", "--verify-transfers",
    ) as process:  # fmt: skip
        yield process


@pytest.fixture(scope="module")
def truth(stormy: Served) -> Mapping[int, list[tuple[int, float]]]:
    return {number: ask(stormy.url, number) for number in range(12)}


def idle(url: str) -> bool:
    """Whether all four workers are there and hold nothing."""
    workers = httpx.get(f"{url}/ready").json()["workers"]
    loads = [worker["load"] for worker in workers]
    return len(loads) == 4 and all(load and load["waiting"] == load["running"] == 0 for load in loads)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2, 3))])
def test_kills_and_stops_under_load(stormy: Served, truth: Mapping[int, list[tuple[int, float]]], seed: int) -> None:
    source = random.Random(seed)
    with ThreadPoolExecutor(CLIENTS) as pool:
        asked: list[tuple[int, Future[list[tuple[int, float]]]]] = []
        for _ in range(6):
            asked += [(number, pool.submit(ask, stormy.url, number)) for number in source.sample(sorted(truth), 6)]
            workers = {name: process for name, process in stormy.children().items() if name != "gateway"}
            name = source.choice(sorted(workers))
            how = source.choice([signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP])
            workers[name].send_signal(how)
            if how is signal.SIGSTOP:
                # Until it has been given up, and what it did goes on elsewhere.
                wait_for(lambda name=name: _gone(stormy.url, name), PATIENCE_S, f"{name} to be missed")
                workers[name].send_signal(signal.SIGCONT)
            wait_for(lambda: httpx.get(f"{stormy.url}/ready").status_code == 200, PATIENCE_S, "a pair")
        answers = [(number, future.result(PATIENCE_S)) for number, future in asked]
    for number, answer in answers:
        for (token, _), (right, margin) in zip(answer, truth[number], strict=True):
            if margin < MARGIN and not canary(number)["temperature"]:
                break
            assert token == right, f"canary {number}: {answer} is not {truth[number]}"
    wait_for(lambda: idle(stormy.url), PATIENCE_S, "all workers to be back and to hold nothing")


def _gone(url: str, name: str) -> bool:
    return all(worker["name"] != name for worker in httpx.get(f"{url}/ready").json()["workers"])
