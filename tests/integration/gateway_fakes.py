"""Workers that answer by rote, a model folder with a tokenizer only, and a gateway process: what its tests need."""

from __future__ import annotations

import json
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import httpx
import zmq
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from wire.capacity import Capacity
from wire.codec import decode, encode
from wire.messages import (
    PROTOCOL_VERSION,
    AttemptId,
    Bye,
    Cancel,
    DecodeTask,
    Failed,
    Fault,
    Finish,
    Hello,
    Incarnation,
    Load,
    Message,
    PrefillTask,
    Role,
    Sampling,
    Token,
    Tokens,
    Welcome,
)

ROOT = Path(__file__).parents[2]
TEXT = "the quick brown fox jumps over the lazy dog, hello 🎉 world. how are you?"
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if messages[0]['role'] == 'alien' %}{{ raise_exception('no aliens') }}{% endif %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
EOS = 2
WAIT_S = 20


def write_model(folder: Path) -> Tokenizer:
    """A byte-level tokenizer with a chat template, its end token 2, and a context of 512 tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT] * 3, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_config.json": {"eos_token": "<|im_end|>", "chat_template": TEMPLATE},
        "config.json": {"vocab_size": tokenizer.get_vocab_size(), "max_position_embeddings": 512, "eos_token_id": 2},
        "generation_config.json": {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95},
    }
    for name, content in settings.items():
        (folder / name).write_text(json.dumps(content))
    return tokenizer


@contextmanager
def running_gateway(folder: Path, **settings: object) -> Iterator[tuple[str, str, subprocess.Popen[str]]]:
    """A gateway process for the model in `folder`: its URL, its control endpoint and the process."""
    endpoint = f"ipc://{folder}/{uuid4().hex[:8]}"
    config = {
        "heartbeat_s": 0.4,
        "silence_s": 1.2,
        "patience_s": 2.0,
        "port": 0,
        "served_model_name": "tiny",
        "control_endpoint": endpoint,
        **settings,
    }
    code = (
        "import json, sys\nfrom pathlib import Path\n"
        "from gateway.config import GatewayConfig\nfrom gateway.server import run\n"
        f"run(GatewayConfig(Path({str(folder)!r}), **json.loads(sys.argv[1])), lambda url: print(url, flush=True))\n"
        "print('torch' in sys.modules)\n"
    )
    command = [sys.executable, "-c", code, json.dumps(config)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        url = process.stdout.readline().strip()
        assert url.startswith("http://"), "the gateway did not start; see its output above"
        yield url, endpoint, process
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(WAIT_S)
        process.stdout.close()


class Gateway(NamedTuple):
    """A running gateway, from a client's side."""

    url: str
    endpoint: str
    tokenizer: Tokenizer

    @property
    def reply(self) -> list[int]:
        """What the fake workers say, by default: TEXT and the end token."""
        return [*self.tokenizer.encode(TEXT).ids, EOS]

    def post(self, route: str, **body: object) -> httpx.Response:
        return httpx.post(f"{self.url}/v1/{route}", json=body, timeout=30)


class FakeWorker(threading.Thread):
    """A worker whose every answer is `reply`, cut at `max_tokens` or after a stop token.

    It answers at once, so that decode's tokens may overtake prefill's. `pause_at`: say nothing from that index on.
    `fault`: fail each task instead. `mute`: stop beating. `paced`: a token every millisecond, not all at once.
    """

    def __init__(self, endpoint: str, role: Role, reply: list[int], name: str = "", **changes: object) -> None:
        super().__init__(daemon=True)
        self.reply = reply
        self.pause_at = 1 << 30
        self.fault: Fault | None = None
        self.mute = False
        self.paced = False
        self._unsent: deque[Token] = deque()
        self._sayings: queue.Queue[Message] = queue.Queue()
        self.seen: queue.Queue[Message] = queue.Queue()
        self.incarnation = Incarnation(uuid4().hex)
        self._endpoint = endpoint
        self._leave = threading.Event()
        holds = int(str(changes.get("holds", 1024)))
        capacity = Capacity(
            max_running_requests=64, max_request_tokens=holds, num_rows=64, num_pages=512, num_slots=64, page_size=16
        )
        fingerprint = str(changes.get("fingerprint", "f"))
        self.hello = Hello(
            PROTOCOL_VERSION, name or f"{role.value}-{uuid4().hex[:6]}", self.incarnation, role, "tiny", fingerprint,
            "s", "ipc:///nowhere" if role is Role.DECODE else "", capacity,
        )  # fmt: skip
        self.start()
        self.await_message(Welcome)

    def await_message(self, kind: type[Message]) -> Message:
        """The next message of this kind; others before it are dropped."""
        while not isinstance(message := self.seen.get(timeout=WAIT_S), kind):
            pass
        return message

    def say(self, message: Message) -> None:
        """Have the worker send a message of its own."""
        self._sayings.put(message)

    def leave(self) -> None:
        self._leave.set()
        self.join(WAIT_S)

    def run(self) -> None:
        socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        socket.connect(self._endpoint)
        socket.send(encode(self.hello))
        beat_at = time.monotonic() + 0.1
        while not self._leave.is_set():
            if socket.poll(1 if self._unsent else 20):
                self._on_message(socket, decode(socket.recv()))
            while self._unsent:
                # One message a token, as when a batch has one request.
                token = self._unsent.popleft()
                socket.send(encode(Tokens(self.hello.worker, self.incarnation, (token,))))
                if self.paced:
                    break
            while not self._sayings.empty():
                socket.send(encode(self._sayings.get()))
            if time.monotonic() > beat_at and not self.mute:
                socket.send(encode(Load(self.hello.worker, self.incarnation, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0.0)))
                beat_at = time.monotonic() + 0.1
        socket.send(encode(Bye(self.hello.worker, self.incarnation)))
        socket.close(linger=2000)

    def _on_message(self, socket: zmq.Socket[bytes], message: Message) -> None:
        if isinstance(message, PrefillTask | DecodeTask):
            if self.fault is not None:
                socket.send(encode(Failed(message.attempt, self.fault, f"{self.hello.worker} says no")))
            else:
                self._unsent.extend(self._tokens(message.attempt, message.sampling, message.generated))
        self.seen.put(message)

    def _tokens(self, attempt: AttemptId, sampling: Sampling, generated: int) -> list[Token]:
        answer = []
        for index, token_id in list(enumerate(self.reply[: sampling.max_tokens]))[generated:]:
            stops = token_id in sampling.stop_token_ids
            last = index + 1 == sampling.max_tokens
            finish = Finish.STOP if stops else Finish.LENGTH if last else None
            logprob = None if sampling.logprobs is None else -0.5 - index
            top = tuple((token_id + n, -0.5 - index - n) for n in range(sampling.logprobs or 0))
            answer.append(Token(attempt, index, token_id, logprob, top, finish))
            if stops:
                break
        mine = {Role.PREFILL: answer[:1], Role.DECODE: answer[1:], Role.COLOCATED: answer}[self.hello.role]
        return [token for token in mine if token.index < self.pause_at]


def await_workers(url: str, count: int) -> httpx.Response:
    """The `/ready` response once so many workers are there."""
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        response = httpx.get(f"{url}/ready")
        if len(response.json()["workers"]) == count:
            return response
    raise AssertionError(f"there are {response.json()['workers']}, not {count} workers")


def cancelled(worker: FakeWorker) -> AttemptId:
    """The attempt that the worker is next told to cancel."""
    message = worker.await_message(Cancel)
    assert isinstance(message, Cancel)
    return message.attempt


def events(response: httpx.Response) -> list[Any]:
    """The bodies of a complete stream's events."""
    lines = [line for line in response.text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def error_of(response: httpx.Response) -> dict[str, Any]:
    """The error that a response carries, in OpenAI's shape."""
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error
