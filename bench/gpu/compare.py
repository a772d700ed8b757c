"""Tokens a second of GPT-2 on one card: this project's trainer beside PyTorch and llm.c, in one run.

    python3 bench/gpu/compare.py --trainer target/release/trainer [--columns 8x1024,tiny] [--out results.json]

PyTorch trains in this very run. llm.c's rates are those measured on an H200 (see docs/benchmarks.md), times what a large bf16
product reaches here over what it reached there. One clock, the wall's; one measure of memory, what the device has used. Each
trains for `--warm-up` seconds before the steps that count, since a card slows down as it warms.
"""

import argparse
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time

HERE = pathlib.Path(__file__).resolve().parent

# Layers, width, heads, batch, tokens a sequence; tokens a second of llm.c on 2026-12-01 and its GiB.
COLUMNS = {
    "8x1024": (12, 768, 12, 8, 1024, 485_900, 5.5),
    "32x1024": (12, 768, 12, 32, 1024, 568_300, 14.8),
    "64x1024": (12, 768, 12, 64, 1024, 593_300, 27.3),
    "1x256": (12, 768, 12, 1, 256, 56_890, 2.5),
    "tiny": (6, 384, 6, 4, 256, 455_100, 1.2),
}

# TFLOP/s of the product on the card and the day of llm.c's rates.
PRODUCT = 797.0


def used_memory():
    """Bytes that the first card has in use, by all processes."""
    told = subprocess.run(["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"],
                          capture_output=True, text=True, check=True)
    return int(told.stdout.split()[0]) << 20


def watched(command):
    """Runs it; its output and the most memory of the card that was in use meanwhile, less what was before."""
    before, most, over = used_memory(), [0], threading.Event()

    def watch():
        while not over.wait(0.5):
            most[0] = max(most[0], used_memory())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    finally:
        over.set()
        watcher.join()
    if done.returncode != 0:
        sys.exit(f"{command[0]} ended with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return done.stdout, most[0] - before


def train_ours(options, column, steps, folder):
    layers, dim, heads, batch, tokens, *_ = COLUMNS[column]
    settings = {"model.layers": layers, "model.dim": dim, "model.heads": heads, "model.seq_len": tokens,
                "train.global_batch": batch, "train.steps": steps}
    command = [options.trainer, "train", HERE / "gpt2.toml", "--run-dir", folder]
    for pair in [f"{key}={value}" for key, value in settings.items()] + options.set:
        command += ["--set", pair]
    _, memory = watched(command)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return lines, memory


def ours(options, column):
    """Median of five windows behind the warm-up."""
    with tempfile.TemporaryDirectory() as scratch:
        scratch = pathlib.Path(scratch)
        short, _ = train_ours(options, column, 20, scratch / "short")
        a_step = statistics.median(line["seconds"] for line in short[5:])
        warm, counted = (max(10, round(seconds / a_step)) for seconds in (options.warm_up, options.seconds))
        lines, memory = train_ours(options, column, warm + counted, scratch / "long")
    seconds = [line["seconds"] for line in lines[warm:]]
    window = max(1, len(seconds) // 5)
    windows = [statistics.mean(seconds[at:at + window]) for at in range(0, window * 5, window) if seconds[at:at + window]]
    return {"seconds": statistics.median(windows), "memory": memory,
            "first_loss": lines[0]["loss"], "last_loss": lines[-1]["loss"]}


def torch(options, column):
    layers, dim, heads, batch, tokens, *_ = COLUMNS[column]
    command = [sys.executable, HERE / "torch_peer.py", "--layers", layers, "--dim", dim, "--heads", heads, "--batch", batch,
               "--tokens", tokens, "--warm-up", options.warm_up, "--seconds", options.seconds]
    out, memory = watched(command)
    return {**json.loads(out.splitlines()[-1]), "memory": memory}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trainer", default=shutil.which("trainer") or "target/release/trainer")
    parser.add_argument("--columns", default=",".join(COLUMNS))
    parser.add_argument("--warm-up", type=float, default=10)
    parser.add_argument("--seconds", type=float, default=5)
    parser.add_argument("--set", action="append", default=[], help="a setting of the trainer, as section.key=value")
    parser.add_argument("--without-torch", action="store_true")
    parser.add_argument("--out", type=pathlib.Path)
    options = parser.parse_args()
    columns = options.columns.split(",")
    unknown = [column for column in columns if column not in COLUMNS]
    if unknown:
        parser.error(f"no column {', '.join(unknown)}; there are {', '.join(COLUMNS)}")
    if not os.path.exists(options.trainer):
        parser.error(f"there is no '{options.trainer}': cargo build --release -p trainer")
    probe = json.loads(watched([sys.executable, HERE / "torch_peer.py", "--probe"])[0].splitlines()[-1])
    scale = probe["tflops"] / PRODUCT
    print(f"{probe['what']}: {probe['tflops']:.0f} TFLOP/s, {scale:.3f} of the card that llm.c was measured on")
    results = {"date": time.strftime("%Y-%m-%d"), "probe": probe, "columns": {}}
    head = f"{'':>8} {'ours':>9} {'torch':>9} {'llm.c':>9}   ratio to the better   GiB ours, torch, llm.c"
    print(head)
    for column in columns:
        tokens = COLUMNS[column][3] * COLUMNS[column][4]
        mine = ours(options, column)
        peer = None if options.without_torch else torch(options, column)
        rates = [tokens / mine["seconds"], tokens / peer["seconds"] if peer else float("nan"), COLUMNS[column][5] * scale]
        better = max(rate for rate in rates[1:] if rate == rate)
        gib = [mine["memory"] / 2**30, peer["memory"] / 2**30 if peer else float("nan"), COLUMNS[column][6]]
        print(f"{column:>8} {rates[0]:>9.0f} {rates[1]:>9.0f} {rates[2]:>9.0f}   {rates[0] / better:>19.3f}   "
              + ", ".join(f"{g:.1f}" for g in gib), flush=True)
        results["columns"][column] = {"ours": mine, "torch": peer, "llm.c, scaled": rates[2], "ratio": rates[0] / better}
    if options.out:
        options.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
