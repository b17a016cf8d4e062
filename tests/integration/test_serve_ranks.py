"""`tandem serve` with several processes a worker: the same answers at every size, and a clean life."""

from __future__ import annotations

import concurrent.futures
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.integration.gateway_fakes import write_model
from tests.served import STOP_WITHIN_S, Served, is_alive, refused, served, wait_for
from tests.tiny import make_checkpoint

PROMPTS = ["hello world", "the quick brown fox", "how are you?", "jumps over", "x", "the lazy dog 🎉"]
SMALL = ("--memory", "700MiB", "--max-running-requests", "4")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tokenizer = write_model(folder)
    return make_checkpoint("qwen3_5_text", folder, vocab_size=tokenizer.get_vocab_size(), max_position_embeddings=512)


def runtime_in(factory: pytest.TempPathFactory) -> Path:
    path = factory.mktemp("r")
    path.chmod(0o700)
    return path


def complete(url: str, prompt: str) -> list[int]:
    body = {"prompt": prompt, "temperature": 0, "max_tokens": 12, "return_token_ids": True}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    tokens: list[int] = answer.json()["choices"][0]["token_ids"]
    return tokens


@pytest.fixture(scope="module")
def reference(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[int]]:
    """The answers of one process that does it all."""
    with served(runtime_in(tmp_path_factory), str(model), "--mode", "colocated") as process:
        return {prompt: complete(process.url, prompt) for prompt in PROMPTS}


@pytest.fixture(scope="module", params=[("1", "2"), ("2", "1")], ids="x".join)
def unequal(
    request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    prefill, decode = request.param
    arguments = ("--prefill-tp", prefill, "--decode-tp", decode, "--chunk-size", "4", "--page-size", "8", "--poison")
    with served(runtime_in(tmp_path_factory), str(model), *arguments, *SMALL) as process:
        yield process


def test_answers_do_not_depend_on_the_sizes(unequal: Served, reference: dict[str, list[int]]) -> None:
    for prompt in PROMPTS:
        assert complete(unequal.url, prompt) == reference[prompt]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        jobs = [(prompt, pool.submit(complete, unequal.url, prompt)) for prompt in PROMPTS * 4]
        for prompt, job in jobs:
            assert job.result() == reference[prompt]


def ranks_of(process: Served) -> list[psutil.Process]:
    """The followers of all workers."""
    found = psutil.Process(process.popen.pid).children(recursive=True)
    return [child for child in found if is_alive(child) and "rank" in child.cmdline()]


def test_a_dead_rank_is_its_worker_s_end_and_serving_goes_on(
    model: Path, reference: dict[str, list[int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    arguments = ("--prefill-tp", "2", "--decode-tp", "2", "--transfer", "tcp")
    with served(runtime_in(tmp_path_factory), str(model), *arguments, *SMALL) as process:
        assert complete(process.url, PROMPTS[0]) == reference[PROMPTS[0]]
        for _ in range(2):
            former = {child.pid for child in ranks_of(process)}
            assert len(former) == 2
            victim = ranks_of(process)[0]
            victim.kill()

            def replaced(former: set[int] = former, victim: int = victim.pid) -> bool:
                now = {child.pid for child in ranks_of(process)}
                ready = httpx.get(f"{process.url}/ready")
                return len(now) == 2 and victim not in now and now != former and ready.status_code == 200

            wait_for(replaced, 90, "another rank in its place")

            def answers() -> bool:
                body = {"prompt": PROMPTS[1], "temperature": 0, "max_tokens": 12, "return_token_ids": True}
                answer = httpx.post(f"{process.url}/v1/completions", json=body, timeout=60)
                return answer.status_code == 200 and answer.json()["choices"][0]["token_ids"] == reference[PROMPTS[1]]

            wait_for(answers, 60, "an answer from the new worker")
        everyone = [*ranks_of(process), *process.children().values()]
        assert process.stop(signal.SIGINT) < STOP_WITHIN_S
        assert not [child for child in everyone if is_alive(child)]
        assert process.leftovers() == []


def test_ranks_leave_with_a_killed_launcher(model: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    with served(runtime_in(tmp_path_factory), str(model), "--decode-tp", "2", *SMALL) as process:
        everyone = [*ranks_of(process), *process.children().values()]
        process.popen.kill()
        process.popen.wait()
        wait_for(lambda: not any(is_alive(child) for child in everyone), STOP_WITHIN_S, "everyone's end")


def test_a_size_that_cannot_be_split_is_refused_before_loading(
    model: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    code, output = refused(runtime_in(tmp_path_factory), "serve", str(model), "--decode-tp", "4", *SMALL)
    assert code != 0
    assert "linear_num_value_heads is 6, which 4 tensor-parallel ranks cannot share evenly" in output
    assert "starting" not in output
