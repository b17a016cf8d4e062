"""Peak memory and speed of loading a checkpoint, whole and as tensor-parallel shares.

    python benchmarks/loading.py [--megabytes 512] [--json]

Each share loads in a process of its own, so that the peak is that of this load alone. "peak" is the most resident
memory that no file backs (sampled), against the bytes of the rank's weights; the goal is at most 1.2. About 33 MiB of
it are torch's own, whatever the size. "read" is the plain read of the same file in one pass, as the floor.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import torch

SHARES = ((1, 0), (2, 0), (2, 1), (4, 0))


def make_checkpoint(folder: Path, megabytes: int) -> None:
    """A Llama of about this size in bfloat16."""
    from safetensors.torch import save_file

    hidden, layers = 1024, max(1, round(megabytes * 2**20 / 2 / (1024 * 1024 * 14)))
    config = {
        "model_type": "llama", "vocab_size": 32000, "hidden_size": hidden, "intermediate_size": 3 * hidden,
        "num_hidden_layers": layers, "num_attention_heads": 16, "num_key_value_heads": 8,
        "tie_word_embeddings": True, "max_position_embeddings": 4096,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    rows = {
        "self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (hidden // 2, hidden),
        "self_attn.v_proj": (hidden // 2, hidden), "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (3 * hidden, hidden), "mlp.up_proj": (3 * hidden, hidden),
        "mlp.down_proj": (hidden, 3 * hidden),
        "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,),
    }  # fmt: skip
    tensors = {"model.embed_tokens.weight": torch.randn(32000, hidden), "model.norm.weight": torch.ones(hidden)}
    for layer in range(layers):
        for name, shape in rows.items():
            tensors[f"model.layers.{layer}.{name}.weight"] = torch.randn(shape)
    save_file({name: tensor.bfloat16() for name, tensor in tensors.items()}, folder / "model.safetensors")


def anonymous_bytes(process: psutil.Process) -> int:
    """Resident bytes of this process that no file backs."""
    memory = process.memory_info()
    return memory.rss - getattr(memory, "shared", 0)


def load(folder: Path, dtype: str, ranks: int, rank: int) -> None:
    """Load one share and print what it took, as JSON. Runs in a process of its own."""
    from models.checkpoint import Checkpoint
    from models.layers.ranks import Ranks
    from models.weights import load_decoder
    from pools.spec import DType

    torch.set_num_threads(1)
    checkpoint = Checkpoint.open(folder)
    process, samples, done = psutil.Process(), [0], threading.Event()
    before = anonymous_bytes(process)

    def sample() -> None:
        while not done.wait(0.002):
            samples.append(anonymous_bytes(process))

    sampler = threading.Thread(target=sample)
    sampler.start()
    started = time.perf_counter()
    decoder = load_decoder(checkpoint, DType(dtype), ranks=Ranks(rank, ranks))
    seconds = time.perf_counter() - started
    samples.append(anonymous_bytes(process))
    done.set()
    sampler.join()
    weights = sum(parameter.nbytes for parameter in decoder.parameters())
    print(json.dumps({"weights": weights, "peak": max(samples) - before, "seconds": seconds}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=512)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--load", nargs=4, metavar=("FOLDER", "DTYPE", "RANKS", "RANK"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.load:
        folder, dtype, ranks, rank = arguments.load
        load(Path(folder), dtype, int(ranks), int(rank))
        return
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        make_checkpoint(folder, arguments.megabytes)
        started = time.perf_counter()
        size = sum(len(block) for block in _blocks(folder / "model.safetensors"))
        read_s = time.perf_counter() - started
        results = []
        for dtype in ("bfloat16", "float32"):
            for ranks, rank in SHARES:
                command = [sys.executable, __file__, "--load", directory, dtype, str(ranks), str(rank)]
                output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
                results.append({"dtype": dtype, "ranks": ranks, "rank": rank, **json.loads(output)})
    if arguments.json:
        print(json.dumps({"file_bytes": size, "read_seconds": read_s, "loads": results}, indent=2))
        return
    print(f"file {size / 2**20:.0f} MiB, read in one pass in {read_s:.2f} s")
    print(f"{'dtype':<10} {'rank':<6} {'weights MiB':>11} {'peak MiB':>9} {'peak/weights':>12} {'seconds':>8}")
    for row in results:
        ratio = row["peak"] / row["weights"]
        print(
            f"{row['dtype']:<10} {row['rank']}/{row['ranks']:<4} {row['weights'] / 2**20:>11.0f} "
            f"{row['peak'] / 2**20:>9.0f} {ratio:>12.2f} {row['seconds']:>8.2f}"
        )


def _blocks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while block := file.read(16 << 20):
            yield block


if __name__ == "__main__":
    main()
