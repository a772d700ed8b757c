"""What a step's streams do beside each other: timelines of several ranks, drawn, and how much communication is exposed.

    python3 bench/gpu/overlap.py --trainer target/release/trainer --out FOLDER [--sizes quickstart,124m] [--layouts dp2,…]

Each run is a few steps of which one is traced, with events of the device around everything that it is given; so these steps
are slower than others, and no rate is taken from them. Every layout is run eagerly and replayed by microbatches. FOLDER gets
NAME.json for ui.perfetto.dev, NAME.svg with a row for each rank and stream, and table.md. Exposed is communication during
which nothing else of the same rank runs; ranks that share a card also wait for each other there, so it shows order, not speed.
A replayed graph is one slice, collectives in it included, which are counted.
"""

import argparse
import json
import pathlib
import sys
from xml.sax.saxutils import escape

from runs import (HERE, Failed, exposed, find_trainer, layout_settings, pairs, report, run, slices_of, table,
                  trainer_command)

QUICK = {"train.eval_interval": 0, "train.eval_samples": 0, "log.sample_tokens": 0}
# Configuration and what is put over it.
SIZES = {
    "quickstart": (HERE.parents[1] / "configs" / "quickstart.toml", QUICK),
    "124m": (HERE / "gpt2.toml", {"train.global_batch": 16, "log.sample_tokens": 0}),
}
COLOURS = {"op": "#4a7ab5", "graph": "#7d9fc9", "joint": "#d9822b"}
WIDTH, ROW, LEFT, LIMIT = 1600, 18, 190, 120


def svg(events, title):
    """A row for each rank and stream."""
    slices = slices_of(events)
    rows = sorted({(pid, tid) for pid, tid, *_ in slices})
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    first, last = min(s[4] for s in slices), max(s[5] for s in slices)
    scale = (WIDTH - LEFT - 10) / max(last - first, 1e-3)
    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{ROW * (len(rows) + 2)}" font-family="sans-serif" font-size="11">',
             f'<text x="4" y="13">{escape(title)}: {(last - first) / 1e3:.2f} ms; blue operations, light blue graphs, orange collectives</text>']
    for at, row in enumerate(rows):
        y = ROW * (at + 1) + 4
        lines.append(f'<text x="4" y="{y + 11}">{escape(f"rank {row[0] - 1}, {names.get(row, row[1])}")}</text>')
        for pid, tid, kind, name, start, end in slices:
            if (pid, tid) == row:
                x, width = LEFT + (start - first) * scale, max((end - start) * scale, 0.4)
                lines.append(f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{ROW - 4}" fill="{COLOURS.get(kind, "#888")}">'
                             f"<title>{escape(name)}, {end - start:.1f} us</title></rect>")
    return "\n".join(lines + ["</svg>", ""])


def one(options, size, layout, scope):
    """Cells of the table's row."""
    config, settings = SIZES[size]
    name = f"{size}-{layout}-{scope if scope != 'none' else 'eager'}"
    path = options.out / f"{name}.json"
    put = settings | layout_settings(layout) | {"graph.scope": scope, "train.steps": 4, "device.kind": options.device,
                                                "device.timeout_seconds": 30, "log.progress": "none", "log.tensorboard": "false"}
    command = trainer_command(options.trainer, config, options.out / "runs" / name, pairs(put) + options.set)
    run(command + ["--timeline", str(path), "--timeline-steps", "3..3"], LIMIT, cards=0)
    events = json.loads(path.read_text())["traceEvents"]
    slices = slices_of(events)
    if not slices:
        raise Failed(f"{path} has no slice: the device told no times")
    (options.out / f"{name}.svg").write_text(svg(events, name))
    told = exposed(slices)
    span = max(s[5] for s in slices) - min(s[4] for s in slices)
    worst = max(told, key=lambda rank: told[rank][1])
    graphs = sum(kind == "graph" for _, _, kind, *_ in slices)
    return [name, f"{span / 1e3:.2f}", len(slices), graphs, f"{told[worst][0] / 1e3:.2f}", f"{told[worst][1] / 1e3:.2f}", worst]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trainer", help="default: the one on the path, else target/release/trainer")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("overlap"), help="folder; default: %(default)s")
    parser.add_argument("--sizes", default="quickstart,124m", help=f"of {', '.join(SIZES)}; default: %(default)s")
    parser.add_argument("--layouts", default="dp2,gtp2dp2,tp2gtp2dp2", help="default: %(default)s")
    parser.add_argument("--scopes", default="none,microbatch", help="of graphs; default: %(default)s")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="default: %(default)s")
    parser.add_argument("--set", action="append", default=[], help="a setting of the trainer, as section.key=value")
    options = parser.parse_args()
    if unknown := set(options.sizes.split(",")) - set(SIZES):
        parser.error(f"no size {', '.join(sorted(unknown))}; there are {', '.join(SIZES)}")
    options.trainer = find_trainer(options.trainer)
    options.out.mkdir(parents=True, exist_ok=True)
    rows, failures = [], []
    for size in options.sizes.split(","):
        for layout in options.layouts.split(","):
            for scope in options.scopes.split(","):
                try:
                    rows.append(one(options, size, layout, scope))
                    print(*rows[-1], sep=", ", flush=True)
                except Failed as failed:
                    failures.append(f"{size} {layout} {scope}: {failed}")
                    print(failures[-1], flush=True)
    head = ["", "step, ms", "slices", "graphs", "communication, ms", "exposed, ms", "of rank"]
    text = table(head, rows)
    report(text, "\n".join(failures), options.out / "table.md")
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
