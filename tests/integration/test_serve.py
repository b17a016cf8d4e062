"""`tandem serve` as its users meet it: real processes, the official client, curl-like requests, signals and kills."""

from __future__ import annotations

import concurrent.futures
import json
import os
import shutil
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.integration.gateway_fakes import write_model
from tests.served import STOP_WITHIN_S, Served, is_alive, refused, served, wait_for
from tests.tiny import make_checkpoint, oracle_logits

PROMPTS = ["hello world", "the quick brown fox", "how are you?", "jumps over", "x", "the lazy dog 🎉"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tokenizer = write_model(folder)
    return make_checkpoint("qwen3_5_text", folder, vocab_size=tokenizer.get_vocab_size(), max_position_embeddings=512)


def runtime_in(factory: pytest.TempPathFactory) -> Path:
    """A short path: socket names are limited to about a hundred bytes."""
    path = factory.mktemp("r")
    path.chmod(0o700)
    return path


def complete(url: str, prompt: Any, **fields: Any) -> dict[str, Any]:
    body = {"prompt": prompt, "temperature": 0, "max_tokens": 12, "return_token_ids": True, **fields}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    choice: dict[str, Any] = answer.json()["choices"][0]
    return choice


@pytest.fixture(scope="module")
def disaggregated(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    arguments = ("--prefill", "2", "--decode", "2", "--chunk-size", "4", "--page-size", "8")
    arguments += ("--poison", "--verify-transfers", "--check-weights")
    with served(runtime_in(tmp_path_factory), str(model), *arguments) as process:
        yield process


@pytest.fixture(scope="module")
def reference(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[int]]:
    """The colocated worker's greedy answers."""
    with served(runtime_in(tmp_path_factory), str(model), "--mode", "colocated") as process:
        return {prompt: complete(process.url, prompt)["token_ids"] for prompt in PROMPTS}


def test_processes_answer_as_one_process_does(disaggregated: Served, reference: dict[str, list[int]]) -> None:
    for prompt in PROMPTS:
        assert complete(disaggregated.url, prompt)["token_ids"] == reference[prompt]


def test_many_at_once_get_their_own_answers(disaggregated: Served, reference: dict[str, list[int]]) -> None:
    before = _handoffs(disaggregated.url)
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        jobs = [(prompt, pool.submit(complete, disaggregated.url, prompt)) for prompt in PROMPTS * 8]
        for prompt, job in jobs:
            assert job.result()["token_ids"] == reference[prompt]
    assert _handoffs(disaggregated.url) == before + len(jobs)


def _handoffs(url: str) -> int:
    """Hand-offs that the decode workers have taken: what heartbeats say, once they have said it for three seconds."""
    reading, since = -1, time.monotonic()

    def is_settled() -> bool:
        nonlocal reading, since
        workers = httpx.get(f"{url}/ready").json()["workers"]
        total = sum(worker["load"]["handoffs"] for worker in workers if worker["role"] == "decode")
        if total != reading:
            reading, since = total, time.monotonic()
        return time.monotonic() - since > 3

    wait_for(is_settled, 30, "heartbeats that agree")
    return reading


def test_the_answer_is_transformers(disaggregated: Served, model: Path) -> None:
    prompt = [5, 77, 130, 8, 200, 41, 3]
    choice = complete(disaggregated.url, prompt, max_tokens=16, ignore_eos=True, logprobs=2)
    logits = oracle_logits(model, prompt + choice["token_ids"])
    for index, token_id in enumerate(choice["token_ids"]):
        best, second = logits[len(prompt) - 1 + index].log_softmax(-1).topk(2).values.tolist()
        if best - second < 1e-3:
            break
        assert token_id == int(logits[len(prompt) - 1 + index].argmax())
        assert choice["logprobs"]["token_logprobs"][index] == pytest.approx(best, abs=2e-3)
    else:
        assert index == 15


def test_the_official_client_streams_and_does_not(disaggregated: Served) -> None:
    client = openai.OpenAI(base_url=f"{disaggregated.url}/v1", api_key="none")
    (model,) = client.models.list().data
    chat: Any = {
        "model": model.id, "messages": [{"role": "user", "content": "hello world"}], "max_tokens": 16, "seed": 3,
    }  # fmt: skip
    whole = client.chat.completions.create(**chat)
    assert whole.usage is not None
    pieces = []
    usage = None
    for event in client.chat.completions.create(**chat, stream=True, stream_options={"include_usage": True}):
        usage = event.usage or usage
        pieces += [choice.delta.content or "" for choice in event.choices]
    assert "".join(pieces) == whole.choices[0].message.content
    assert usage is not None
    assert usage.model_dump(exclude={"prompt_tokens_details"}) == whole.usage.model_dump(
        exclude={"prompt_tokens_details"}
    )
    # The same prompt again: decode still holds its whole pages, and says so.
    for answered, cached in ((whole.usage, 0), (usage, usage.prompt_tokens // 16 * 16)):
        assert answered.prompt_tokens_details is not None
        assert answered.prompt_tokens_details.cached_tokens == cached


def test_a_stop_string_and_a_seed(disaggregated: Served) -> None:
    fields: dict[str, Any] = {"temperature": 1.0, "seed": 11, "max_tokens": 40, "ignore_eos": True}
    text = complete(disaggregated.url, "hello", **fields)["text"]
    assert complete(disaggregated.url, "hello", **fields)["text"] == text
    stop = text[5:8]
    stopped = complete(disaggregated.url, "hello", **fields, stop=stop)
    assert stopped["text"] == text[: text.index(stop)]
    assert stopped["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        ({"prompt": "x" * 4000, "max_tokens": 4}, 400, "512"),
        ({"prompt": [1, 2], "max_tokens": 511}, 400, "512"),
        ({"prompt": [100000]}, 400, "vocabulary"),
        ({"prompt": "x", "temperature": -1}, 400, "temperature"),
        ({"prompt": "x", "max_tokens": "many"}, 400, "max_tokens"),
        ({}, 400, "prompt"),
        ({"prompt": "x", "model": "gpt-9"}, 404, "gpt-9"),
    ],
)
def test_bad_requests_are_told_so_and_the_server_goes_on(
    disaggregated: Served, reference: dict[str, list[int]], body: dict[str, Any], status: int, says: str
) -> None:
    answer = httpx.post(f"{disaggregated.url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == status
    assert says in answer.json()["error"]["message"]
    assert complete(disaggregated.url, PROMPTS[0])["token_ids"] == reference[PROMPTS[0]]


def test_a_dead_worker_is_started_again_and_serving_goes_on(
    model: Path, reference: dict[str, list[int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    with served(runtime_in(tmp_path_factory), str(model)) as process:
        for victim in ("prefill-0", "decode-0"):
            complete(process.url, PROMPTS[0])
            former = process.children()[victim]
            former.kill()
            wait_for(
                lambda name=victim, pid=former.pid: (  # type: ignore[misc]
                    (child := process.children().get(name)) is not None
                    and child.pid != pid
                    and _has_joined(process.url, name, pid)
                ),
                60,
                f"a new {victim}",
            )
            assert complete(process.url, PROMPTS[1])["token_ids"] == reference[PROMPTS[1]]


def _has_joined(url: str, name: str, former: int) -> bool:
    """Whether the gateway knows the worker as another process than `former` (an incarnation begins with the pid)."""
    workers = httpx.get(f"{url}/ready").json()["workers"]
    return any(worker["name"] == name and not worker["incarnation"].startswith(f"{former:x}-") for worker in workers)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_everything(model: Path, tmp_path_factory: pytest.TempPathFactory, signum: int) -> None:
    with served(runtime_in(tmp_path_factory), str(model)) as process:
        children = process.children()
        assert set(children) == {"gateway", "prefill-0", "decode-0"}
        body = {"prompt": "hello", "max_tokens": 400, "stream": True, "ignore_eos": True}
        with httpx.stream("POST", f"{process.url}/v1/completions", json=body, timeout=60) as stream:
            next(stream.iter_lines())
            assert process.stop(signum) < STOP_WITHIN_S
        assert process.popen.returncode == 0
        assert not [name for name, child in children.items() if is_alive(child)]
        assert process.leftovers() == []
        assert "Traceback" not in process.output


def test_a_killed_launcher_takes_everything_along(model: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    runtime = runtime_in(tmp_path_factory)
    with served(runtime, str(model)) as process:
        children = process.children()
        process.popen.kill()
        process.popen.wait()
        wait_for(lambda: not any(is_alive(child) for child in children.values()), STOP_WITHIN_S, "the children's end")
        stale = process.leftovers()
        assert stale  # nobody was left to remove them
    with served(runtime, str(model)) as process:
        assert not set(stale) & set(process.leftovers())
        complete(process.url, "hello")
    assert process.leftovers() == []


def _broken_config(folder: Path) -> None:
    (folder / "config.json").write_text("{")


def _unknown_type(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "rwkv9"}))


def _cut_weights(folder: Path) -> None:
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])


def _no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def _no_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (_broken_config, "config.json"),
        (_unknown_type, "rwkv9'; implemented: "),
        (_cut_weights, "model.safetensors"),
        (_no_weights, "model.safetensors"),
        (_no_tokenizer, "tokenizer"),
    ],
)
def test_a_broken_checkpoint_is_one_clear_line(
    model: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, damage: Any, says: str
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(model, folder)
    damage(folder)
    code, output = refused(runtime_in(tmp_path_factory), "serve", str(folder), "--port", "0")
    assert code != 0
    assert says in output
    assert "Traceback" not in output
    assert output.count("Error:") == 1, output


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("serve", "/nowhere"), "no model folder"),
        (("serve", "MODEL", "--mamba-size", "0"), "--mamba-size"),
        (("serve", "MODEL", "--memory", "1MiB"), "--memory"),
        (("serve", "MODEL", "--memory", "lots"), "no amount of memory"),
        (("serve", "MODEL", "--speed", "11"), "No such option"),
        (("serve", "MODEL", "--transfer", "pigeon"), "pigeon"),
        (("serve", "MODEL", "--host", "203.0.113.7"), "203.0.113.7"),
        (("plan", "MODEL", "--role", "decode", "--memory", "513MiB", "--max-running-requests", "0"), "0"),
    ],
)
def test_bad_options_are_one_clear_line(
    model: Path, tmp_path_factory: pytest.TempPathFactory, arguments: tuple[str, ...], says: str
) -> None:
    named = tuple(str(model) if argument == "MODEL" else argument for argument in arguments)
    code, output = refused(runtime_in(tmp_path_factory), *named)
    assert code != 0
    assert says in output
    assert "Traceback" not in output


def test_a_taken_port_is_said_before_anything_starts(model: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, output = refused(runtime_in(tmp_path_factory), "serve", str(model), "--port", str(port))
    assert code != 0
    assert f"cannot listen on 127.0.0.1:{port}" in output
    assert "choose another --port" in output
    assert "starting" not in output


def test_a_runtime_directory_that_others_can_enter_is_refused(
    model: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    runtime = runtime_in(tmp_path_factory)
    base = runtime / f"tandem-{os.getuid()}"
    base.mkdir()
    base.chmod(0o755)
    code, output = refused(runtime, "serve", str(model), "--port", "0")
    assert code != 0
    assert "only you can enter" in output
