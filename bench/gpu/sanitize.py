"""compute-sanitizer over this project's own kernels: each test by itself, many at once, so that one slow test costs only itself.

    cargo test -p device --features gpu-tests --test api --no-run --release      prints where the binary is
    python3 bench/gpu/sanitize.py BINARY [--tools memcheck,racecheck,initcheck] [--within 300] [--out FOLDER]

Tests that go through NVIDIA's libraries are left out. Memory of tests is full of NaN from the start, which initcheck takes
for initialised: what reads it before it is written shows as a wrong result there, and initcheck sees what kernels work in
beside their arguments. Exit codes: 0 clean, 1 findings or failed tests, 3 nothing found but not everything ended in time.
"""

import argparse
import concurrent.futures
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time

from runs import report, table

TOOLS = ("memcheck", "racecheck", "initcheck")
MODULES = r"^api::card_(kernels|layers|bf16|memory|attention|products)::"
# Of libraries, or a card's choice among their algorithms.
LIBRARIES = r"library|cudnn|measured|in_a_graph|a_graph_of|same_bits_whenever|weight_gradients_from_bf16|waits_for_no_other"
SUMMARY = {"memcheck": r"ERROR SUMMARY: (\d+) error", "initcheck": r"ERROR SUMMARY: (\d+) error",
           "racecheck": r"RACECHECK SUMMARY: (\d+) hazard"}
# As the driver needs it, so that a test does not start itself again under the tool.
ENVIRONMENT = {"CUDA_DEVICE_MAX_CONNECTIONS": "32", "CUDA_MODULE_LOADING": "EAGER", "NCCL_MULTI_RANK_GPU_ENABLE": "1",
               "NCCL_NVLS_ENABLE": "0", "NCCL_RUNTIME_CONNECT": "0", "NCCL_GRAPH_REGISTER": "0", "RUST_BACKTRACE": "0"}
CLEAN, LATE = "clean", "not ended"


def tests_of(binary, wanted, unwanted):
    """Names of tests that match."""
    told = subprocess.run([binary, "--list"], capture_output=True, text=True, check=True)
    names = [line.removesuffix(": test") for line in told.stdout.splitlines() if line.endswith(": test")]
    return [name for name in names if re.search(wanted, name) and not re.search(unwanted, name)]


def verdict(tool, code, text):
    """What a tool's output says."""
    summary = re.search(SUMMARY[tool], text)
    if summary and int(summary[1]):
        return f"{summary[1]} found"
    if "test result: FAILED" in text:
        return "test failed"
    if not summary:
        return "not run: " + (next((line for line in text.splitlines() if "rror" in line), "no summary")[:60])
    if code != 0 or "1 passed" not in text:
        return f"ended with {code}"
    return CLEAN


def environment(folder, kernels, limit):
    """Tests take turns on a card by a file in their temporary folder; each process has one of its own here. Machines wait for
    as long as the test may take."""
    folder.mkdir(parents=True)
    if kernels.exists():
        shutil.copytree(kernels, folder / kernels.name)
    return {**os.environ, **ENVIRONMENT, "TMPDIR": str(folder), "WARPWEFT_TEST_TIMEOUT_S": str(max(1, int(limit)))}


def ended_within(seconds, command, env):
    """Exit code and output. A tool starts the test as a process of its own: one that is late goes with it, code None."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", env=env,
                               start_new_session=True)
    try:
        text = process.communicate(timeout=seconds)[0]
        return process.returncode, text
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return None, process.communicate()[0]


def check(options, kernels, tool, test, scratch):
    """The verdict on a test, seconds, output."""
    name, begin = f"{tool}.{test.replace('::', '.')}", time.monotonic()
    left = min(options.limit, options.end - begin)
    if left <= 0:
        return LATE, 0.0
    command = [options.sanitizer, "--tool", tool, "--error-exitcode", "9", "--print-limit", "20", options.binary, test,
               "--exact", "--test-threads=1", "--nocapture"]
    code, text = ended_within(left, command, environment(scratch / name, kernels, left))
    found = LATE if code is None else verdict(tool, code, text)
    (options.out / f"{name}.txt").write_text(text)
    return found, time.monotonic() - begin


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("binary", help="device's tests `api`, built with the feature gpu-tests")
    parser.add_argument("--tools", default=",".join(TOOLS), help="default: %(default)s")
    parser.add_argument("--limit", type=float, default=80, help="seconds for a test under a tool; default: %(default)s")
    parser.add_argument("--within", type=float, default=300, help="seconds for everything; default: %(default)s")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="tests at once; default: the cores, %(default)s")
    parser.add_argument("--tests", default=MODULES, help="regular expression of names; default: %(default)s")
    parser.add_argument("--without", default=LIBRARIES, help="default: %(default)s")
    parser.add_argument("--sanitizer", default=shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("sanitized"), help="folder for what the tools print")
    options = parser.parse_args()
    options.tools, options.binary = options.tools.split(","), os.path.abspath(options.binary)
    if unknown := set(options.tools) - set(TOOLS):
        parser.error(f"no tool {', '.join(sorted(unknown))}; there are {', '.join(TOOLS)}")
    for path, way_out in [(options.sanitizer, "it comes with the CUDA toolkit; give --sanitizer PATH"),
                          (options.binary, "cargo test -p device --features gpu-tests --test api --no-run")]:
        if not os.path.exists(path):
            parser.error(f"there is no '{path}': {way_out}")
    return options


def main():
    options, begin = arguments(), time.monotonic()
    options.end = begin + options.within
    tests = tests_of(options.binary, options.tests, options.without)
    if not tests:
        sys.exit(f"no test of {options.binary} matches {options.tests}: is it built with the feature gpu-tests?")
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        scratch = pathlib.Path(scratch)
        # Kernels are compiled once, without a tool.
        first = environment(scratch / "first", scratch / "none", options.limit)
        subprocess.run([options.binary, tests[0], "--exact"], capture_output=True, timeout=120, env=first)
        kernels = scratch / "first" / "warpweft-test-kernels"
        if not kernels.exists():
            sys.exit(f"{tests[0]} does not run without a tool either: try {options.binary} {tests[0]} --exact")
        with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
            begun = {(test, tool): pool.submit(check, options, kernels, tool, test, scratch)
                     for tool in options.tools for test in tests}
    results = {key: each.result() for key, each in begun.items()}
    cell = lambda found, seconds: f"{found}, {seconds:.0f} s"
    rows = [[test.removeprefix("api::"), *(cell(*results[test, tool]) for tool in options.tools)] for test in tests]
    text = table(["", *options.tools], rows)
    clean = sum(found == CLEAN for found, _ in results.values())
    late = sum(found == LATE for found, _ in results.values())
    report(text, f"{clean} of {len(results)} clean, {late} not ended; {time.monotonic() - begin:.0f} s",
           options.out / "table.md")
    sys.exit(0 if clean == len(results) else 3 if clean + late == len(results) else 1)


if __name__ == "__main__":
    main()
