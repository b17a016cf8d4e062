"""Train the bundled demo model: a tiny hybrid language model of readable English, from scratch, on a CPU.

The text is Jane Austen's six novels as Debian's `r-cran-janeaustenr` ships them. The model is transformers' own
`qwen3_5_text` (three Gated DeltaNet layers, one full-attention layer); the result is an ordinary checkpoint folder
that `AutoModelForCausalLM` and `AutoTokenizer` load unchanged.

    python examples/train_demo.py --out examples/demo-model --threads 2
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import random
import re
import struct
import subprocess
import tempfile
import time
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

# Most of transformers is untyped; one name for it says so once.
hf: Any = transformers

PACKAGE = "r-cran-janeaustenr"
PACKAGE_VERSION = "1.0.0-1"
PACKAGE_SHA256 = "df6bddf211906d1ff404f8ff662c21b34e6660e7f54a311084e749050c019c95"
DATA_FILE = "usr/lib/R/site-library/janeaustenr/data/Rdata.rdb"

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
VOCABULARY = 2048
MINIMAL_TEXT = 200_000  # bytes; with less, dialogues run out before a long sequence is full
HELD_OUT_SHARE = 0.01
EVALUATION_WINDOW = 512
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# Sequence length from each share of the training on. Short sequences learn the language at the lowest cost; the
# longer ones at the end teach the positions and the recurrent decay that a served prompt needs.
SEQUENCE_LENGTHS = ((0.0, 256), (0.7, 512), (0.9, 1024))


@dataclass(frozen=True, slots=True)
class Recipe:
    """The numbers of a training run: counts of steps and tokens, and AdamW's rates."""

    steps: int
    tokens_per_step: int = 2048
    peak_rate: float = 3e-3
    final_rate: float = 1e-4
    warmup_steps: int = 100
    weight_decay: float = 0.1
    dialogue_share: float = 0.2
    seed: int = 1


@dataclass(frozen=True, slots=True)
class Streams:
    """Training tokens: the prose as one int64 line, and dialogues with the offset at which each starts."""

    prose: Tensor
    dialogues: Tensor
    dialogue_starts: Tensor


def fetch_package(folder: Path) -> Path:
    """Download the Debian package into `folder`, check its digest and return the path of its data file."""
    subprocess.run(["apt-get", "download", f"{PACKAGE}={PACKAGE_VERSION}"], cwd=folder, check=True)
    archive = next(folder.glob(f"{PACKAGE}_*.deb"))
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    if digest != PACKAGE_SHA256:
        raise ValueError(f"{archive.name} has SHA-256 {digest}, expected {PACKAGE_SHA256}; give the text with --text")
    subprocess.run(["dpkg-deb", "-x", str(archive), str(folder)], check=True)
    return folder / DATA_FILE


def read_r_database(path: Path) -> Iterator[list[str]]:
    """Yield the lines of each text in an R lazy-load database.

    An entry is a big-endian length and a zlib stream, which holds a version-3 XDR serialisation ("R Internals",
    section 1.8): a 23-byte header, the flags of a character vector, its length, then flags, length and bytes of each
    string.
    """
    rest = path.read_bytes()
    while rest:
        inflate = zlib.decompressobj()
        entry = inflate.decompress(rest[4:])
        rest = inflate.unused_data
        (count,) = struct.unpack_from(">I", entry, 27)
        at, lines = 31, []
        for _ in range(count):
            (size,) = struct.unpack_from(">I", entry, at + 4)
            lines.append(entry[at + 8 : at + 8 + size].decode())
            at += 8 + size
        yield lines


def paragraphs_of(lines: list[str]) -> list[str]:
    """Join hard-wrapped lines into paragraphs, without the marks of italics and the editors' bracketed notes."""
    joined = "\n".join(line.strip() for line in lines)
    blocks = (re.sub(r"\s+", " ", block).replace("_", "").strip() for block in re.split(r"\n{2,}", joined))
    # One novel ends with a modern editor's note, which is not the author's.
    return [
        block for block in blocks if block and not re.search(r"\[|A NOTE ON THE TEXT|modern British usage", block)
    ]


def load_documents(text: Path | None) -> list[list[str]]:
    """Return each document as its paragraphs: the six novels, or the one UTF-8 file `text`."""
    if text is not None:
        if text.stat().st_size < MINIMAL_TEXT:
            raise ValueError(f"{text} has {text.stat().st_size} bytes; training needs at least {MINIMAL_TEXT}")
        return [paragraphs_of(text.read_text(encoding="utf-8").splitlines())]
    with tempfile.TemporaryDirectory() as folder:
        return [paragraphs_of(lines) for lines in read_r_database(fetch_package(Path(folder)))]


def split_held_out(document: list[str]) -> tuple[list[str], list[str]]:
    """Split a document's paragraphs into training and held-out ones: the last `HELD_OUT_SHARE` of its characters."""
    budget = HELD_OUT_SHARE * sum(map(len, document))
    cut = len(document)
    while cut > 1 and budget > 0:
        cut -= 1
        budget -= len(document[cut])
    return document[:cut], document[cut:]


def sentences_of(paragraph: str) -> list[str]:
    """Split a paragraph after each full stop, question or exclamation mark that no short title causes."""
    return re.split(r"(?:(?<=[.!?])|(?<=[.!?]\"))(?<!Mr\.)(?<!Mrs\.)(?<!Dr\.)(?<!St\.) (?=[\"A-Z])", paragraph)


def exchanges_of(document: list[str], rng: random.Random) -> Iterator[tuple[str, str]]:
    """Yield requests and answers: one speech and the next, or a sentence and the few that follow it."""
    names = re.compile(r"(?<=[a-z,;] )(?:(?:Mr|Mrs|Miss|Lady|Sir|Captain)\.? )?[A-Z][a-z]{3,}")
    answered = False
    for paragraph, following in pairwise(document):
        spoken = paragraph.startswith('"') and following.startswith('"') and len(paragraph) + len(following) < 800
        # A speech that answered the one before opens no exchange itself, or every other request would be an echo.
        answered = spoken and not answered
        if answered:
            yield paragraph.strip('"'), following.strip('"')
        if spoken:
            continue
        sentences = sentences_of(paragraph)
        if len(sentences) < 2:
            continue
        at = rng.randrange(len(sentences) - 1)
        answer = " ".join(sentences[at + 1 : at + 1 + rng.randint(1, 4)])
        form = rng.random()
        named = names.search(answer)
        if named and form < 0.4:
            yield f"Tell me about {named[0]}.", answer
        elif form < 0.5:
            yield "Tell me a story.", answer
        elif form < 0.75:
            yield f"Continue: {sentences[at]}", answer
        else:
            yield sentences[at], answer


def dialogues_of(documents: list[list[str]], rng: random.Random) -> list[str]:
    """Lay exchanges out as ChatML conversations of one to three turns, in random order."""
    conversations = []
    for document in documents:
        exchanges = list(exchanges_of(document, rng))
        while exchanges:
            turns, exchanges = exchanges[: (size := rng.randint(1, 3))], exchanges[size:]
            laid_out = (
                f"{TURN_START}user\n{request}{TURN_END}\n{TURN_START}assistant\n{answer}{TURN_END}\n"
                for request, answer in turns
            )
            conversations.append("".join(laid_out) + END_OF_TEXT)
    rng.shuffle(conversations)
    return conversations


def train_tokenizer(documents: list[list[str]]) -> Any:
    """Train a byte-level BPE of `VOCABULARY` tokens, the special ones included."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END_OF_TEXT, TURN_START, TURN_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((paragraph for document in documents for paragraph in document), trainer)
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        additional_special_tokens=[TURN_START],
        chat_template=CHAT_TEMPLATE,
        model_max_length=2048,
        clean_up_tokenization_spaces=False,
    )


def encode_streams(documents: list[list[str]], tokenizer: Any, rng: random.Random) -> Streams:
    """Encode prose and dialogues; every document and every conversation ends with `<|endoftext|>`."""
    prose = "".join("\n\n".join(document) + END_OF_TEXT for document in documents)
    conversations = [tokenizer(text)["input_ids"] for text in dialogues_of(documents, rng)]
    sizes = torch.tensor([len(ids) for ids in conversations])
    return Streams(
        prose=torch.tensor(tokenizer(prose, verbose=False)["input_ids"]),
        dialogues=torch.tensor([token for ids in conversations for token in ids]),
        dialogue_starts=sizes.cumsum(0) - sizes,
    )


def draw_batch(streams: Streams, rows: int, length: int, dialogue_share: float, generator: torch.Generator) -> Tensor:
    """Draw `rows` sequences, int64 `(rows, length)`: each from the dialogues with the given chance, else prose."""
    batch = []
    starts = streams.dialogue_starts[streams.dialogue_starts <= len(streams.dialogues) - length]
    for _ in range(rows):
        if torch.rand((), generator=generator) < dialogue_share:
            at = int(starts[torch.randint(len(starts), (), generator=generator)])
            batch.append(streams.dialogues[at : at + length])
        else:
            at = int(torch.randint(len(streams.prose) - length + 1, (), generator=generator))
            batch.append(streams.prose[at : at + length])
    return torch.stack(batch)


def build_model(tokenizer: Any) -> Any:
    """Build the untrained model in float32, with as many key heads and KV heads as two tensor-parallel ranks need."""
    config = hf.Qwen3_5TextConfig(
        vocab_size=VOCABULARY,
        hidden_size=192,
        intermediate_size=576,
        num_hidden_layers=4,
        layer_types=["linear_attention"] * 3 + ["full_attention"],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=32,
        linear_value_head_dim=64,
        linear_conv_kernel_dim=4,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = hf.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.generation_config = hf.GenerationConfig(
        eos_token_id=tokenizer.convert_tokens_to_ids([TURN_END, END_OF_TEXT]),
        pad_token_id=tokenizer.pad_token_id,
        do_sample=True,
        temperature=0.7,
        top_p=0.9,
        top_k=50,
    )
    return model


def save_checkpoint(model: Any, tokenizer: Any, out: Path) -> None:
    """Write configuration, bfloat16 weights and tokenizer; the training model stays in float32."""
    half = hf.AutoModelForCausalLM.from_config(model.config, dtype=torch.bfloat16)
    half.load_state_dict(model.state_dict())
    half.generation_config = model.generation_config
    half.save_pretrained(out)
    tokenizer.save_pretrained(out, save_jinja_files=False)


def learning_rate(step: int, recipe: Recipe) -> float:
    """Return the rate at a step: a linear warm-up, then half a cosine from the peak to the final rate."""
    if step < recipe.warmup_steps:
        return recipe.peak_rate * (step + 1) / recipe.warmup_steps
    done = (step - recipe.warmup_steps) / max(1, recipe.steps - recipe.warmup_steps)
    return recipe.final_rate + (recipe.peak_rate - recipe.final_rate) * 0.5 * (1 + math.cos(math.pi * done))


def build_optimizer(model: Any, recipe: Recipe) -> torch.optim.AdamW:
    """Build AdamW that decays matrices only, never norms, biases or the recurrent gates."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": recipe.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=recipe.peak_rate, betas=(0.9, 0.95))


def train(model: Any, tokenizer: Any, streams: Streams, recipe: Recipe, out: Path) -> None:
    """Train for `recipe.steps` steps; write a checkpoint every 200, so that a run cut short leaves a usable one."""
    optimizer = build_optimizer(model, recipe)
    generator = torch.Generator().manual_seed(recipe.seed)
    started, recent = time.monotonic(), 0.0
    model.train()
    for step in range(recipe.steps):
        length = max(size for share, size in SEQUENCE_LENGTHS if step >= share * recipe.steps)
        rows = recipe.tokens_per_step // length
        batch = draw_batch(streams, rows, length, recipe.dialogue_share, generator)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, recipe)
        loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        recent += loss.item() / 20
        if (step + 1) % 20 == 0:
            elapsed = time.monotonic() - started
            rate = (step + 1) * recipe.tokens_per_step / elapsed
            print(f"step {step + 1}: loss {recent:.3f}, {rate:.0f} tokens/s, {elapsed:.0f} s", flush=True)
            recent = 0.0
        if (step + 1) % 200 == 0:
            save_checkpoint(model, tokenizer, out)


def held_out_loss(folder: Path) -> dict[str, float | int]:
    """Score `heldout.txt` with the saved weights, in float32, on transformers' own forward.

    The text is encoded as a whole and cut into windows of `EVALUATION_WINDOW` tokens that do not overlap (a last
    shorter one is left out); each window is scored alone, so it gives one prediction fewer than it has tokens.
    Returns the mean loss in nats a token and the counts.
    """
    model = hf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = hf.AutoTokenizer.from_pretrained(folder)
    text = (folder / "heldout.txt").read_text(encoding="utf-8")
    # The whole text is longer than a context; only windows of it reach the model.
    ids = torch.tensor(tokenizer(text, verbose=False)["input_ids"])
    windows = ids[: len(ids) // EVALUATION_WINDOW * EVALUATION_WINDOW].view(-1, EVALUATION_WINDOW)
    total = 0.0
    with torch.inference_mode():
        for window in windows:
            logits = model(input_ids=window[None], use_cache=False).logits[0, :-1]
            total += torch.nn.functional.cross_entropy(logits, window[1:], reduction="sum").item()
    predictions = windows.numel() - len(windows)
    return {
        "loss_nats_per_token": round(total / predictions, 5),
        "window_tokens": EVALUATION_WINDOW,
        "windows": len(windows),
        "predictions": predictions,
        "heldout_tokens": len(ids),
        "heldout_bytes": len(text.encode()),
    }


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Train the bundled demo model on a CPU.")
    parser.add_argument("--out", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--text", type=Path, help="train on this UTF-8 file in place of the novels")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads of torch")
    parser.add_argument("--steps", type=int, default=2000, help="optimizer steps of 2048 tokens")
    return parser.parse_args()


def main() -> None:
    """Fetch the text, train tokenizer and model, evaluate the saved checkpoint."""
    chosen = arguments()
    recipe = Recipe(steps=chosen.steps)
    torch.set_num_threads(chosen.threads)
    torch.manual_seed(recipe.seed)
    parts = [split_held_out(document) for document in load_documents(chosen.text)]
    documents = [kept for kept, _ in parts]
    chosen.out.mkdir(parents=True, exist_ok=True)
    held_out = "\n\n".join(paragraph for _, last in parts for paragraph in last)
    (chosen.out / "heldout.txt").write_text(held_out + "\n", encoding="utf-8")
    tokenizer = train_tokenizer(documents)
    streams = encode_streams(documents, tokenizer, random.Random(recipe.seed))
    model = build_model(tokenizer)
    parameters = sum(weight.numel() for weight in model.parameters())
    print(f"{parameters} parameters, {len(streams.prose)} tokens of prose, {len(streams.dialogues)} of dialogue")
    started = time.monotonic()
    train(model, tokenizer, streams, recipe, chosen.out)
    minutes = (time.monotonic() - started) / 60
    save_checkpoint(model, tokenizer, chosen.out)
    report = {
        **held_out_loss(chosen.out),
        "parameters": parameters,
        "training": {**asdict(recipe), "threads": chosen.threads, "minutes": round(minutes, 1)},
    }
    (chosen.out / "evaluation.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
