"""Does training follow PyTorch's? The same initial weights, batches and rates; real text; losses held against each other.

    python3 bench/gpu/curve.py --trainer target/release/trainer [--shape tiny] [--seeds 1,2,3] [--out results]
    python3 bench/gpu/curve.py --trainer … --device cpu --precision f32 --shape small --steps 20       without a card

PyTorch trains once with each kernel of `--attention`. How far its runs come apart is the measure: over the second half of
the steps the mean |difference of losses| between ours and PyTorch's may be `--bound` times that between PyTorch's first two.
The initial weights are those that `trainer init` writes. `--out NAME` writes NAME.json (all losses) and NAME.md.
"""

import argparse
import itertools
import json
import pathlib
import statistics
import struct
import sys
import tempfile
import time

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from batches import batches
from runs import HERE, Failed, find_trainer, lines_of, pairs, report, run, table, trainer_command, words
from torch_peer import Gpt, Update

# Layers, width, heads, batch, tokens a sequence.
SHAPES = {"tiny": (6, 384, 6, 8, 256), "124m": (12, 768, 12, 8, 1024), "small": (2, 64, 2, 4, 64)}
KERNELS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION,
           "efficient": SDPBackend.EFFICIENT_ATTENTION, "math": SDPBackend.MATH}
TYPES = {"BF16": torch.bfloat16, "F32": torch.float32}
BYTES = 256
LIMIT = 300


def read_safetensors(path):
    """Tensors by name."""
    data = path.read_bytes()
    length, = struct.unpack("<Q", data[:8])
    head, body = json.loads(data[8:8 + length]), bytearray(data[8 + length:])
    head.pop("__metadata__", None)
    return {name: torch.frombuffer(body, dtype=TYPES[t["dtype"]], count=(t["data_offsets"][1] - t["data_offsets"][0])
                                   // TYPES[t["dtype"]].itemsize, offset=t["data_offsets"][0]).reshape(t["shape"])
            for name, t in head.items()}


def peer_name(name):
    """What the peer calls a tensor of the `transformers` library, whose matrices of GPT-2 are transposed."""
    for theirs, ours in [("transformer.", ""), ("h.", "blocks."), ("attn.c_attn", "qkv"), ("attn.c_proj", "proj"),
                         ("mlp.c_fc", "fc"), ("mlp.c_proj", "down")]:
        name = name.replace(theirs, ours, 1) if not theirs == "h." or name.startswith("h.") else name
    return name


def load(model, file):
    """Every parameter of the model from the file, and nothing left over."""
    state = {peer_name(name): tensor for name, tensor in read_safetensors(file).items()}
    for name in state:
        if name.endswith(("qkv.weight", "proj.weight", "fc.weight", "down.weight")):
            state[name] = state[name].T.contiguous()
    model.load_state_dict(state, strict=True)


def torch_losses(options, file, windows, kernel):
    layers, dim, heads, _, tokens = SHAPES[options.shape]
    model = Gpt(layers, dim, heads, rows=BYTES, positions=tokens).to(options.device, TYPES[options.precision.upper()])
    load(model, file)
    update, losses = Update(model, options.lr), []
    with sdpa_kernel(KERNELS[kernel]):
        for batch in windows:
            batch = torch.tensor([list(window) for window in batch], device=options.device)
            loss = model(batch[:, :-1].contiguous(), batch[:, 1:].contiguous())
            loss.backward()
            update.step()
            losses.append(loss.detach())
    return torch.stack(losses).double().tolist()


def our_losses(options, folder, text, settings):
    config = HERE / "gpt2.toml"
    run(trainer_command(options.trainer, config, folder / "run", settings), LIMIT, cards=0)
    out = [options.trainer, "init", config, "--out", folder]
    run(words(out + list(itertools.chain(*(("--set", pair) for pair in settings)))), LIMIT, cards=0)
    return [line["loss"] for line in lines_of(folder / "run" / "metrics.jsonl")]


def settings_of(options, seed, text):
    layers, dim, heads, batch, tokens = SHAPES[options.shape]
    return pairs({"model.layers": layers, "model.dim": dim, "model.heads": heads, "model.seq_len": tokens,
                  "model.vocab": BYTES, "model.vocab_rows": BYTES, "train.global_batch": batch, "train.steps": options.steps,
                  "train.seed": seed, "optimizer.lr": options.lr, "precision.param": options.precision,
                  "data.random_tokens": "", "data.path": text, "device.kind": options.device}
                 | ({} if options.device == "cuda" else {"device.deterministic": ""})) + options.set


def of_seed(options, seed, folder):
    """Losses of all runs by name."""
    folder.mkdir()
    text = folder / "text.txt"
    paths = sorted(path for pattern in ("crates/*/src/**/*.rs", "docs/**/*.md") for path in HERE.parents[1].glob(pattern))
    text.write_bytes(b"".join(path.read_bytes() for path in paths))
    _, _, _, batch, tokens = SHAPES[options.shape]
    windows = list(batches(text.read_bytes(), tokens, batch, seed, options.steps))
    losses = {"ours": our_losses(options, folder, text, settings_of(options, seed, text))}
    for kernel in options.attention:
        losses[kernel] = torch_losses(options, folder / "model.safetensors", windows, kernel)
    return losses


def distances(of_seeds, steps):
    """Mean and largest |difference| between each two runs over the second half of the steps, over all seeds."""
    names = list(of_seeds[0])
    return {(a, b): [abs(x - y) for losses in of_seeds for x, y in zip(losses[a][steps // 2:], losses[b][steps // 2:])]
            for a, b in itertools.combinations(names, 2)}


def verdict(between, kernels):
    """Ours to PyTorch's first two, over these two to each other."""
    ours = statistics.mean(statistics.mean(between["ours", kernel]) for kernel in kernels[:2])
    return ours, statistics.mean(between[tuple(kernels[:2])])


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trainer", help="default: the one on the path, else target/release/trainer")
    parser.add_argument("--shape", choices=SHAPES, default="tiny", help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=200, help="default: %(default)s")
    parser.add_argument("--seeds", default="1", help="of weights and batches; default: %(default)s")
    parser.add_argument("--lr", type=float, default=3e-4, help="default: %(default)s")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="default: %(default)s")
    parser.add_argument("--precision", choices=["bf16", "f32"], default="bf16", help="default: %(default)s")
    parser.add_argument("--attention", help="PyTorch's kernels, two or more; default: cudnn,flash on a card, else flash,math")
    parser.add_argument("--bound", type=float, default=1.5, help="default: %(default)s")
    parser.add_argument("--set", action="append", default=[], help="a setting of the trainer, as section.key=value")
    parser.add_argument("--out", type=pathlib.Path, help="results, without an ending")
    options = parser.parse_args()
    options.attention = (options.attention or ("cudnn,flash" if options.device == "cuda" else "flash,math")).split(",")
    if len(set(options.attention)) < 2 or not set(options.attention) <= set(KERNELS):
        parser.error(f"--attention needs two or more of {', '.join(KERNELS)}")
    if options.steps < 4:
        parser.error("--steps must be 4 at least: the second half is compared")
    options.trainer = find_trainer(options.trainer)
    return options


def main():
    options, begin = arguments(), time.monotonic()
    seeds = [int(seed) for seed in options.seeds.split(",")]
    with tempfile.TemporaryDirectory() as scratch:
        try:
            of_seeds = [of_seed(options, seed, pathlib.Path(scratch) / str(seed)) for seed in seeds]
        except Failed as failed:
            sys.exit(str(failed))
    between = distances(of_seeds, options.steps)
    rows = [[f"{a}, {b}", f"{statistics.mean(apart):.3e}", f"{max(apart):.3e}"] for (a, b), apart in between.items()]
    ours, theirs = verdict(between, options.attention)
    where = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
    head = (f"{options.shape}, {options.precision}, {options.steps} steps, seeds {options.seeds}; PyTorch {torch.__version__} "
            f"on {where}; loss {of_seeds[0]['ours'][0]:.4f} -> {of_seeds[0]['ours'][-1]:.4f}")
    text = f"{head}\n\n{table(['losses of', 'mean |difference|', 'largest'], rows)}"
    ratio = ours / theirs if theirs else float("inf") if ours else 0.0
    report(text, f"ours to PyTorch {ours:.3e}, PyTorch to itself {theirs:.3e}: {ratio:.2f} times, at most {options.bound} "
           f"allowed; {time.monotonic() - begin:.0f} s", options.out and options.out.with_suffix(".md"),
           dict(zip(options.seeds.split(","), of_seeds)))
    sys.exit(0 if ratio <= options.bound else 1)


if __name__ == "__main__":
    main()
