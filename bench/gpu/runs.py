"""Runs of the trainer, what their timelines tell, and the memory of cards, for the scripts beside this file."""

import json
import os
import pathlib
import re
import shutil
import signal
import statistics
import subprocess
import threading
import time

HERE = pathlib.Path(__file__).resolve().parent

# Steps before rates count: the first is eager, the second captures, and algorithms and buffers settle.
FIRST_STEPS = 5
# A host that runs ahead finds the last steps of a run done.
LAST_STEPS = 3
# Windows of steps; their median counts.
WINDOWS = 5


class Failed(Exception):
    """A program ended with an error, or told nothing in time."""


def used_memory(cards=1):
    """Bytes that each of the first cards has in use, by all processes."""
    ids = ",".join(str(card) for card in range(cards))
    told = subprocess.run(["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", f"--id={ids}"],
                          capture_output=True, text=True, check=True)
    return [int(line) << 20 for line in told.stdout.split()]


def count_cards():
    """Cards of this host."""
    told = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True, check=True)
    return len(told.stdout.splitlines())


class Memory:
    """The most that each card had in use while this was open, less what it had before; none where there are no cards."""

    def __init__(self, cards=1):
        self.cards, self.over, self.watcher = cards, threading.Event(), None

    def __enter__(self):
        if self.cards:
            self.before = used_memory(self.cards)
            self.most = list(self.before)
            self.watcher = threading.Thread(target=self.watch)
            self.watcher.start()
        return self

    def watch(self):
        while not self.over.wait(0.5):
            self.most = [max(pair) for pair in zip(self.most, used_memory(self.cards))]

    def __exit__(self, *_):
        self.over.set()
        if self.watcher:
            self.watcher.join()

    def taken(self):
        """Of the card that took most."""
        return max(most - before for most, before in zip(self.most, self.before)) if self.cards else None


def words(command):
    return [str(part) for part in command]


def run(command, limit, cards=1, env=None):
    """Output of a program that ends by itself, and the memory it took."""
    with Memory(cards) as memory:
        try:
            done = subprocess.run(words(command), capture_output=True, text=True, timeout=limit,
                                  env=None if env is None else {**os.environ, **env})
        except subprocess.TimeoutExpired as late:
            raise Failed(f"{command[0]} had not ended after {limit} s:\n{(late.stdout or b'')[-2000:]}") from late
    if done.returncode != 0:
        raise Failed(f"{' '.join(words(command))} ended with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return done.stdout, memory.taken()


def last_object(out):
    """The JSON object in the last line."""
    return json.loads(out.splitlines()[-1])


def trainer_command(trainer, config, folder, settings):
    command = [trainer, "train", config, "--run-dir", folder]
    for pair in settings:
        command += ["--set", pair]
    return words(command)


def pairs(settings):
    return [f"{key}={value}" for key, value in settings.items()]


def layout_settings(name):
    """dp2, gtp2dp2, tp2gtp2dp2 as settings."""
    if not re.fullmatch(r"(?:(?:tp|gtp|dp)\d+)+", name):
        raise SystemExit(f"'{name}' is no layout: write axes and their sizes, as in tp2gtp2dp2")
    sizes = {"dp": 1} | {axis: int(size) for axis, size in re.findall(r"(gtp|tp|dp)(\d+)", name)}
    return {f"layout.{axis}": size for axis, size in sizes.items()}


def lines_of(path):
    """Whole lines of metrics that are there."""
    if not path.exists():
        return []
    text = path.read_text()
    return [json.loads(line) for line in text[:text.rfind("\n") + 1].splitlines()]


def train_for(trainer, config, folder, settings, seconds, limit, cards=1, more=()):
    """Trains until `seconds` have passed behind the first steps, ends the run as Ctrl-C does, and gives its metrics,
    the memory it took, and what it printed."""
    command = trainer_command(trainer, config, folder, settings + ["train.steps=10000000"]) + words(more)
    log, begin, ready = folder.with_suffix(".log"), time.monotonic(), None
    folder.parent.mkdir(parents=True, exist_ok=True)
    with Memory(cards) as memory, log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
        try:
            asked = False
            while process.poll() is None:
                time.sleep(0.05)
                now = time.monotonic()
                if now - begin > limit:
                    raise Failed(f"{' '.join(command)} had not ended after {limit} s:\n{log.read_text()[-4000:]}")
                if ready is None and len(lines_of(folder / "metrics.jsonl")) >= FIRST_STEPS:
                    ready = now
                if ready is not None and not asked and now - ready > seconds:
                    asked = True
                    process.send_signal(signal.SIGINT)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    if not asked or process.returncode not in (0, 130):
        raise Failed(f"{' '.join(command)} ended with {process.returncode}:\n{log.read_text()[-4000:]}")
    return lines_of(folder / "metrics.jsonl"), memory.taken(), log.read_text()


def step_seconds(lines, warm_up):
    """Median over windows of the seconds a step takes, behind `warm_up` seconds of steps."""
    lines, at = lines[FIRST_STEPS:len(lines) - LAST_STEPS], 0.0
    counted = []
    for line in lines:
        if at >= warm_up:
            counted.append(line["seconds"])
        at += line["seconds"]
    if len(counted) < WINDOWS:
        raise Failed(f"{len(counted)} steps are left behind {warm_up} s of warm-up, {WINDOWS} are needed: give more --seconds")
    window = len(counted) // WINDOWS
    return statistics.median(statistics.mean(counted[at * window:(at + 1) * window]) for at in range(WINDOWS))


def slices_of(events):
    """(process, thread, kind, name, start, end) in microseconds."""
    return [(e["pid"], e["tid"], e["cat"], e["name"], e["ts"], e["ts"] + e["dur"]) for e in events if e["ph"] == "X"]


def union(spans):
    """Spans that follow each other, without overlaps."""
    joined = []
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1][1] = max(joined[-1][1], end)
        else:
            joined.append([start, end])
    return joined


def length(spans):
    return sum(end - start for start, end in spans)


def exposed(slices):
    """Of each rank: microseconds of communication, and those of it during which nothing else of the rank runs."""
    told = {}
    for rank in sorted({pid for pid, *_ in slices}):
        of = lambda wanted: union((start, end) for pid, _, kind, _, start, end in slices if pid == rank and (kind == "joint") == wanted)
        communication, other = of(True), of(False)
        alone = length(union(communication + other)) - length(other)
        told[rank - 1] = (length(communication), alone)
    return told


def find_trainer(given):
    """The trainer's path, or what to do about it."""
    found = given or shutil.which("trainer") or str(HERE.parents[1] / "target/release/trainer")
    if not os.path.exists(found):
        raise SystemExit(f"there is no '{found}': cargo build --release -p trainer, or give --trainer PATH")
    return os.path.abspath(found)


def table(head, rows):
    """Markdown: the first column to the left, numbers to the right."""
    widths = [max(len(str(row[at])) for row in [head, *rows]) for at in range(len(head))]
    put = lambda row: "| " + " | ".join(str(cell).ljust(w) if at == 0 else str(cell).rjust(w)
                                        for at, (cell, w) in enumerate(zip(row, widths))) + " |"
    rule = "|" + "|".join("-" * (w + 2) if at == 0 else "-" * (w + 1) + ":" for at, w in enumerate(widths)) + "|"
    return "\n".join([put(head), rule, *map(put, rows)])


def report(text, told, path, numbers=None):
    """Prints what was found and what follows from it. `path`, unless None, keeps the former, and numbers as JSON beside it."""
    print(f"\n{text}\n\n{told}" if told else f"\n{text}")
    if path:
        path.write_text(text + "\n")
        if numbers is not None:
            path.with_suffix(".json").write_text(json.dumps(numbers) + "\n")
