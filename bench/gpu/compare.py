"""Tokens a second of GPT-2 on one card: this project's trainer beside PyTorch and llm.c, in one run.

    python3 bench/gpu/compare.py --trainer target/release/trainer [--columns 8x1024,tiny] [--out results]

PyTorch trains in this very run. llm.c's rates are those measured on an H200 (see docs/gpu-results.md), times what a large
bf16 product reaches here over what it reached there. One clock, the wall's; one measure of memory, what the device has used.
Each trains for `--warm-up` seconds before the steps that count, since a card slows down as it warms. Before anything is
timed PyTorch's steps are compiled, all columns at once. `--out NAME` writes NAME.json and NAME.md.
"""

import argparse
import concurrent.futures
import os
import pathlib
import sys
import tempfile
import time

from runs import HERE, Failed, find_trainer, last_object, pairs, report, run, step_seconds, table, train_for

# Layers, width, heads, batch, tokens a sequence; tokens a second of llm.c on 2026-12-01 and its GiB; the ratio aimed at.
COLUMNS = {
    "8x1024": (12, 768, 12, 8, 1024, 485_900, 5.5, 1.05),
    "32x1024": (12, 768, 12, 32, 1024, 568_300, 14.8, 1.05),
    "64x1024": (12, 768, 12, 64, 1024, 593_300, 27.3, 1.05),
    "1x256": (12, 768, 12, 1, 256, 56_890, 2.5, 1.3),
    "tiny": (6, 384, 6, 4, 256, 455_100, 1.2, 1.3),
}

# TFLOP/s of the product on the card and the day of llm.c's rates.
PRODUCT = 797.0

# Seconds that a program may take beside those that it trains for: starting, compiling, measuring.
BESIDE = 120


def ours(options, column, folder):
    layers, dim, heads, batch, tokens, *_ = COLUMNS[column]
    settings = pairs({"model.layers": layers, "model.dim": dim, "model.heads": heads, "model.seq_len": tokens,
                      "train.global_batch": batch}) + options.set
    # Folders side by side share compiled kernels and measured algorithms.
    lines, memory, _ = train_for(options.trainer, HERE / "gpt2.toml", folder / column, settings,
                                 options.warm_up + options.seconds + 0.5, options.warm_up + options.seconds + BESIDE)
    return {"seconds": step_seconds(lines, options.warm_up), "memory": memory, "steps": len(lines),
            "first_loss": lines[0]["loss"], "last_loss": lines[-1]["loss"]}


def torch(options, column, warm_up, seconds):
    layers, dim, heads, batch, tokens, *_ = COLUMNS[column]
    command = [sys.executable, HERE / "torch_peer.py", "--layers", layers, "--dim", dim, "--heads", heads, "--batch", batch,
               "--tokens", tokens, "--warm-up", warm_up, "--seconds", seconds]
    out, memory = run(command, warm_up + seconds + BESIDE)
    return {**last_object(out), "memory": memory}


def compile_all(options, columns):
    """PyTorch keeps what it has compiled; only then can all columns be trained one after the other in a few minutes."""
    with concurrent.futures.ThreadPoolExecutor(len(columns)) as pool:
        begun = {column: pool.submit(torch, options, column, 0.0, 0.0) for column in columns}
    return {column: str(begun[column].exception()) for column in columns if begun[column].exception()}


def compare(options, column, scale, folder, refused):
    """A column's numbers; what could not be measured is none, with the reason."""
    result = {"ours": None, "torch": None, "llm.c, scaled": COLUMNS[column][5] * scale, "failures": []}
    parts = {"ours": lambda: ours(options, column, folder)}
    if column in refused:
        result["failures"].append(f"torch: {refused[column]}")
    elif not options.without_torch:
        parts["torch"] = lambda: torch(options, column, options.warm_up, options.seconds)
    for name, measure in parts.items():
        try:
            result[name] = measure()
        except Failed as failed:
            result["failures"].append(f"{name}: {failed}")
    return result


def row(column, result):
    """Cells of the table's row, and whether its aims are met."""
    _, _, _, batch, tokens, _, gib_peer, aim = COLUMNS[column]
    rate = lambda part: batch * tokens / result[part]["seconds"] if result[part] else None
    mine, torch, llm_c = rate("ours"), rate("torch"), result["llm.c, scaled"]
    ratio = mine / max(llm_c, torch or 0) if mine else None
    gib = [result[part]["memory"] / 2**30 if result[part] else None for part in ("ours", "torch")]
    cell = lambda value, form: "-" if value is None else format(value, form)
    cells = [column, cell(mine, ",.0f"), cell(torch, ",.0f"), cell(llm_c, ",.0f"), cell(ratio, ".3f"), f"{aim:.2f}",
             cell(gib[0], ".1f"), cell(gib[1], ".1f"), f"{gib_peer:.1f}"]
    return cells, ratio is not None and ratio >= aim and round(gib[0], 1) <= gib_peer


HEAD = ["", "ours, tokens/s", "PyTorch", "llm.c, scaled", "ratio to the better", "aim", "GiB, ours", "PyTorch", "llm.c, at most"]


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trainer", help="default: the one on the path, else target/release/trainer")
    parser.add_argument("--columns", default=",".join(COLUMNS), help="default: %(default)s")
    parser.add_argument("--warm-up", type=float, default=10, help="seconds; default: %(default)s")
    parser.add_argument("--seconds", type=float, default=4, help="that count; default: %(default)s")
    parser.add_argument("--set", action="append", default=[], help="a setting of the trainer, as section.key=value")
    parser.add_argument("--without-torch", action="store_true")
    parser.add_argument("--out", type=pathlib.Path, help="results, without an ending")
    options = parser.parse_args()
    options.columns = options.columns.split(",")
    unknown = [column for column in options.columns if column not in COLUMNS]
    if unknown:
        parser.error(f"no column {', '.join(unknown)}; there are {', '.join(COLUMNS)}")
    options.trainer = find_trainer(options.trainer)
    return options


def main():
    options, begin = arguments(), time.monotonic()
    # Loading all kernels at once takes memory, of which each would then be blamed for all that its libraries have.
    os.environ.pop("CUDA_MODULE_LOADING", None)
    try:
        probe = last_object(run([sys.executable, HERE / "torch_peer.py", "--probe"], BESIDE)[0])
    except (Failed, OSError) as failed:
        sys.exit(f"the product that llm.c's rates are scaled by cannot be measured: {failed}")
    scale = probe["tflops"] / PRODUCT
    print(f"{probe['what']}: {probe['tflops']:.0f} TFLOP/s, {scale:.3f} of the card that llm.c was measured on", flush=True)
    refused = {} if options.without_torch else compile_all(options, options.columns)
    print(f"{time.monotonic() - begin:.0f} s: PyTorch's steps are compiled", flush=True)
    results, rows, all_met = {}, [], True
    with tempfile.TemporaryDirectory() as scratch:
        for column in options.columns:
            results[column] = compare(options, column, scale, pathlib.Path(scratch), refused)
            cells, met = row(column, results[column])
            rows.append(cells)
            all_met = all_met and met
            print(f"{time.monotonic() - begin:.0f} s: {', '.join(cells)}", *results[column]["failures"], sep="\n", flush=True)
    text = f"{probe['what']}: {probe['tflops']:.0f} TFLOP/s, {scale:.3f} of {PRODUCT:.0f}\n\n{table(HEAD, rows)}"
    seconds = time.monotonic() - begin
    report(text, f"{'all aims are met' if all_met else 'aims are missed'}; {seconds:.0f} s in all",
           options.out and options.out.with_suffix(".md"),
           {"date": time.strftime("%Y-%m-%d"), "probe": probe, "columns": results, "seconds": seconds})
    if any(result["failures"] for result in results.values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
