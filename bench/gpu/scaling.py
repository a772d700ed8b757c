"""Weak scaling on the cards of one host: this project's layouts beside PyTorch's DDP and FSDP2, in one run.

    python3 bench/gpu/scaling.py --trainer target/release/trainer --out FOLDER [--sizes 124m,1b3] [--gpus 1,2,4,8] [--list]

Every card has a rank and the same share of the batch at any number of cards; efficiency is tokens a second of a card over those
of one card alone. Layouts: replicas (dp) and as many weight shards (gtp) as cards, as many tensor ranks (tp) as divide the heads
with replicas for the rest, and all mixed; replicas share the optimizer's state. Ways: eager; replayed by microbatches; where
there are replicas also with all gates before the replay. Eager runs trace one early step: its communication, and the part of it
during which nothing else of the rank runs, on the rank where that is most. Memory is what the fullest card has used beside what
the plan says of the ranks on it: one, where there are enough cards.

FOLDER gets results.jsonl, a line as each run ends, table.md, and timelines. Runs that are in results.jsonl are not repeated, and
with `--within` those that would come too late are left out: the next call goes on. Numbers of `--device cpu` try this out and
mean nothing.
"""

import argparse
import itertools
import json
import pathlib
import re
import sys
import time

from runs import (HERE, Failed, count_cards, exposed, find_trainer, last_object, layout_settings, pairs, report, run,
                  slices_of, step_seconds, table, train_for)

# Configuration, layers, width, heads, sequences of a card, tokens of each, rows of the embedding.
SIZES = {
    "124m": ("gpt2.toml", 12, 768, 12, 32, 1024, 50304),
    "1b3": ("gpt3_1b3.toml", 24, 2048, 16, 4, 2048, 50304),
    "small": ("gpt2.toml", 2, 64, 4, 2, 64, 256),
}
WAYS = {
    "eager": {"graph.scope": "none"},
    "replayed": {"graph.scope": "microbatch", "graph.gates": "in-graph"},
    "gates before": {"graph.scope": "microbatch", "graph.gates": "before-replay"},
}
TORCH = ("ddp", "fsdp2")
AIM = 0.97
# Seconds that a run may take beside those that it trains for, and those that it usually takes.
BESIDE, USUALLY = 150, 15


def layouts(gpus, heads):
    """dp4, gtp4, tp4, gtp2dp2: those of so many cards."""
    if gpus == 1:
        return ["dp1"]
    tensor = max(n for n in range(1, gpus + 1) if gpus % n == 0 and heads % n == 0)
    rest = f"dp{gpus // tensor}" if tensor < gpus else ""
    mixed = {4: ["gtp2dp2"], 8: ["tp2gtp2dp2"]}.get(gpus, [])
    return [f"dp{gpus}", f"gtp{gpus}"] + ([f"tp{tensor}{rest}"] if tensor > 1 else []) + mixed


def replicas(layout):
    return layout_settings(layout)["layout.dp"]


def plan(options):
    """(size, cards, layout or kind of PyTorch, way) of every run, in order."""
    found = []
    for size in options.sizes:
        for gpus in options.gpus:
            for layout in layouts(gpus, SIZES[size][3]):
                for way in options.ways:
                    if way != "gates before" or replicas(layout) > 1:
                        found.append((size, gpus, layout, way))
            found += [(size, gpus, kind, "torch") for kind in options.torch]
    return found


def name_of(one):
    size, gpus, layout, way = one
    return f"{size} {gpus} {layout} {way}"


def planned_bytes(text):
    """Of each rank, as `trainer plan` prints it."""
    found = re.search(r"parameters on \d+ ranks?, ([\d.]+) MiB", text)
    if not found:
        raise Failed(f"trainer plan tells no memory of a rank:\n{text[:1000]}")
    return float(found[1]) * 2**20


def settings_of(one, device):
    size, gpus, layout, way = one
    _, layers, dim, heads, batch, tokens, rows = SIZES[size]
    settings = layout_settings(layout) | WAYS[way] | {
        "model.layers": layers, "model.dim": dim, "model.heads": heads, "model.seq_len": tokens, "model.vocab_rows": rows,
        "model.vocab": min(rows, 50257), "train.global_batch": batch * gpus, "device.kind": device,
        "optimizer.distributed": str(replicas(layout) > 1).lower()}
    return settings | ({"device.deterministic": "", "precision.param": "f32"} if device == "cpu" else {})


def ours(options, one):
    _, gpus, _, way = one
    config, settings = HERE / SIZES[one[0]][0], pairs(settings_of(one, options.device)) + options.set
    planned, _ = run([options.trainer, "plan", config, *itertools.chain(*(("--set", pair) for pair in settings))], BESIDE, 0)
    timeline = options.out / f"{name_of(one).replace(' ', '-')}.json"
    more = ["--timeline", timeline, "--timeline-steps", "3..3"] if way == "eager" else []
    seconds = options.warm_up + options.seconds
    lines, memory, _ = train_for(options.trainer, config, options.out / "runs" / timeline.stem, settings, seconds + 0.5,
                                 seconds + BESIDE, options.used(gpus), more)
    on_one = -(-gpus // (options.used(gpus) or gpus))
    result = {"seconds": step_seconds(lines, options.warm_up), "memory": memory, "steps": len(lines),
              "planned": planned_bytes(planned) * on_one, "first_loss": lines[0]["loss"], "last_loss": lines[-1]["loss"]}
    if more:
        told = exposed(slices_of(json.loads(timeline.read_text())["traceEvents"]))
        result["communication"], result["exposed"] = (micros / 1e6 for micros in max(told.values(), key=lambda pair: pair[1]))
    return result


def torch(options, one):
    size, gpus, kind, _ = one
    _, layers, dim, heads, batch, tokens, rows = SIZES[size]
    command = [options.python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", gpus, HERE / "torch_scaling.py",
               "--kind", kind, "--device", options.device, "--layers", layers, "--dim", dim, "--heads", heads, "--batch", batch,
               "--tokens", tokens, "--rows", rows, "--warm-up", options.warm_up, "--seconds", options.seconds]
    out, memory = run(command, options.warm_up + options.seconds + BESIDE, options.used(gpus), env={"OMP_NUM_THREADS": "1"})
    return {**last_object(out), "memory": memory}


def rate(one, result):
    """Tokens a second of a card."""
    _, _, _, _, batch, tokens, _ = SIZES[one[0]]
    return batch * tokens / result["seconds"]


def alone(one, results):
    """The run that this one's efficiency is held against."""
    size, _, layout, way = one
    first = (size, 1, layout, way) if way == "torch" else (size, 1, "dp1", "eager" if way == "eager" else "replayed")
    return results.get(first)


def efficiency(one, results):
    base = alone(one, results)
    return rate(one, results[one]) / rate(one, base) if base else None


HEAD = ["size, cards, layout, way", "tokens/s of a card", "efficiency", "over DDP", "over FSDP2", "step, ms", "communication, ms", "exposed, ms",
        "GiB used", "planned"]


def row(one, results):
    cell = lambda value, form: "-" if value is None else format(value, form)
    result, (size, gpus, _, way) = results[one], one
    times = lambda key, by, form: cell(None if result.get(key) is None else result[key] * by, form)
    peers = [results.get((size, gpus, kind, "torch")) for kind in TORCH]
    over = ["-" if way == "torch" or peer is None else f"{peer['seconds'] / result['seconds']:.3f}" for peer in peers]
    return [name_of(one), f"{rate(one, result):,.0f}", cell(efficiency(one, results), ".3f"), *over, times("seconds", 1e3, ".2f"),
            times("communication", 1e3, ".2f"), times("exposed", 1e3, ".2f"), times("memory", 2**-30, ".2f"), times("planned", 2**-30, ".2f")]


def aims(results):
    """For the most cards of each size: whether replicas alone and weight shards alone keep what is aimed at, replayed."""
    told = []
    for size in dict.fromkeys(one[0] for one in results):
        gpus = max(one[1] for one in results if one[0] == size)
        for axis in ("dp", "gtp"):
            one = (size, gpus, f"{axis}{gpus}", "replayed")
            share = efficiency(one, results) if gpus > 1 and one in results else None
            if share is not None:
                told.append(f"{name_of(one)}: efficiency {share:.3f}, aim {AIM}: {'reached' if share >= AIM else 'missed'}")
    return told


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    listed = lambda text: text.split(",") if text else []
    parser.add_argument("--trainer", help="default: the one on the path, else target/release/trainer")
    parser.add_argument("--python", default=sys.executable, help="one with torch; default: %(default)s")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("scaling"), help="folder; default: %(default)s")
    parser.add_argument("--sizes", type=listed, default="124m,1b3", help=f"of {', '.join(SIZES)}; default: %(default)s")
    parser.add_argument("--gpus", type=listed, default="1,2,4,8", help="default: %(default)s")
    parser.add_argument("--ways", type=listed, default=",".join(WAYS), help="default: %(default)s")
    parser.add_argument("--torch", type=listed, default=",".join(TORCH), help="'' for none; default: %(default)s")
    parser.add_argument("--warm-up", type=float, default=3, help="seconds; default: %(default)s")
    parser.add_argument("--seconds", type=float, default=4, help="that count; default: %(default)s")
    parser.add_argument("--within", type=float, default=float("inf"), help="seconds for all runs; default: no limit")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="default: %(default)s")
    parser.add_argument("--set", action="append", default=[], help="a setting of the trainer, as section.key=value")
    parser.add_argument("--list", action="store_true", help="tell which runs there are, and run none")
    options = parser.parse_args()
    for key, known in (("sizes", SIZES), ("ways", WAYS), ("torch", TORCH)):
        if unknown := [word for word in getattr(options, key) if word not in known]:
            parser.error(f"--{key}: no {', '.join(unknown)}; there are {', '.join(known)}")
    if not all(count.isdecimal() and int(count) > 0 for count in options.gpus):
        parser.error(f"--gpus: {','.join(options.gpus)} are no numbers of cards")
    options.gpus = [int(count) for count in options.gpus]
    return options


def known_results(path, how):
    """What earlier calls measured, the same way."""
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    for line in lines:
        if line["how"] != how:
            raise SystemExit(f"{path} was measured with {line['how']}, this call has {how}: give another --out")
    return {tuple(line["run"]): line["result"] for line in lines}


def main():
    options, begin = arguments(), time.monotonic()
    runs = plan(options)
    if options.list:
        lasts = len(runs) * (options.warm_up + options.seconds + USUALLY)
        return print(*map(name_of, runs), f"{len(runs)} runs, about {lasts:.0f} s", sep="\n")
    options.trainer = find_trainer(options.trainer)
    have = count_cards() if options.device == "cuda" else 0
    options.used = lambda gpus: min(gpus, have)
    options.out = options.out.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "results.jsonl"
    how = {"device": options.device, "cards": have, "warm_up": options.warm_up, "seconds": options.seconds, "set": options.set}
    results, failures, late = known_results(path, how), [], []
    for one in runs:
        passed = time.monotonic() - begin
        if one in results:
            continue
        if passed + options.warm_up + options.seconds + USUALLY > options.within:
            late.append(name_of(one))
            continue
        try:
            results[one] = (torch if one[3] == "torch" else ours)(options, one)
            with path.open("a") as file:
                file.write(json.dumps({"run": one, "how": how, "result": results[one]}) + "\n")
            print(f"{time.monotonic() - begin:.0f} s: {', '.join(row(one, results))}", flush=True)
        except (Failed, OSError) as failed:
            failures.append(f"{name_of(one)}: {failed}")
            print(failures[-1], flush=True)
    done = [one for one in results if one in runs] + [one for one in results if one not in runs]
    text = "\n\n".join(filter(None, [table(HEAD, [row(one, results) for one in done]), "\n".join(aims(results) if have else [])]))
    told = [f"{time.monotonic() - begin:.0f} s in all", *failures]
    if late:
        told += [f"left out, there are {options.within:.0f} s:", *(f"  {one}" for one in late)]
    report(text, "\n".join(told), options.out / "table.md")
    sys.exit(1 if failures else 3 if late else 0)


if __name__ == "__main__":
    main()
