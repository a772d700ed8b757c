"""All tests for cards, module by module: a module that stands still or breaks the card costs only itself, and is told.

    python3 bench/gpu/suite.py                               builds the tests and runs those of all modules
    python3 bench/gpu/suite.py --only 'gtp_api|card_' --limit 300 --out FOLDER
    python3 bench/gpu/suite.py --binaries FOLDER             test binaries that were built before, elsewhere

Each module of each test binary runs in a process of its own, one test after the other, and a process that is not through
within `--limit` seconds is ended. `--tests` leaves out what does not match: `cuda|card` skips columns of other drivers
where a suite names them. FOLDER gets what each process printed and table.md. Exit codes: 0 all passed; 1 something failed;
3 nothing failed but not everything ended in time.
"""

import argparse
import json
import os
import pathlib
import re
import subprocess
import sys
import time

from runs import HERE, report, table

FEATURES = ("test", "--locked", "--release", "--workspace", "--features", "tests/gpu-tests", "--no-run", "--message-format=json")
# A first run may compile kernels and make many communicators.
LIMIT = 240


def built():
    """Test binaries by package and target, as `cargo` builds them."""
    told = subprocess.run(["cargo", *FEATURES], stdout=subprocess.PIPE, text=True, cwd=HERE.parents[1])
    if told.returncode:
        sys.exit("the tests were not built: see above")
    return binaries_of(told.stdout.splitlines())


def binaries_of(lines):
    """Out of what `cargo` tells: libraries and tests, without examples and benches."""
    found = {}
    for line in lines:
        message = json.loads(line) if line.startswith("{") else {}
        target = message.get("target", {})
        if message.get("executable") and message["profile"]["test"] and target["kind"][0] in ("lib", "test"):
            package = pathlib.PurePath(re.split(r"[#@]", message["package_id"])[0]).name
            found[f"{package}_{target['name'] if target['kind'][0] == 'test' else 'lib'}"] = message["executable"]
    return found


def modules_of(names):
    """Names of tests by module: the first two parts of a path, where it has as many."""
    found = {}
    for name in names:
        *path, _ = name.split("::")
        found.setdefault("::".join(path[:2]) or name, []).append(name)
    return found


def tests_of(binary):
    """Names of its tests; none if it is no binary of tests."""
    told = subprocess.run([binary, "--list"], capture_output=True, text=True)
    return [line.removesuffix(": test") for line in told.stdout.splitlines() if line.endswith(": test")]


def verdict(code, text, count):
    """(passed, what else there is to say) of a process that had `count` tests; a code of None: it was ended."""
    passed = len(re.findall(r"\.\.\. ok$", text, re.MULTILINE))
    # Whatever a test prints may come between its name and its end.
    if summary := re.search(r"^test result: \w+\. (\d+) passed; (\d+) failed", text, re.MULTILINE):
        passed = int(summary[1])
        failed = re.findall(r"^    (\S+)$", text[text.rfind("\nfailures:"):], re.MULTILINE) if int(summary[2]) else []
        if failed:
            return passed, "failed: " + ", ".join(dict.fromkeys(failed))
        if code == 0 and passed == count:
            return passed, ""
        return passed, f"ended with {code}, {passed} of {count} ran"
    begun = re.findall(r"^test (\S+) \.\.\. ", text, re.MULTILINE)
    at = f" in {begun[-1]}" if begun else ""
    return passed, (f"not ended{at}" if code is None else f"ended with {code}{at}")


def run_module(options, name, binary, module, tests):
    """A row of the table."""
    begin, log = time.monotonic(), options.out / f"{name}.{module.replace('::', '.')}.txt"
    with log.open("w") as file:
        command = [binary, *tests, "--exact", "--test-threads=1"]
        try:
            code = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, timeout=options.limit).returncode
        except subprocess.TimeoutExpired:
            code = None
    passed, told = verdict(code, log.read_text(errors="replace"), len(tests))
    return [f"{name} {module}", f"{passed} of {len(tests)}", f"{time.monotonic() - begin:.0f}", told]


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binaries", type=pathlib.Path, help="folder of binaries; default: what cargo builds")
    parser.add_argument("--only", default="", help="regular expression of 'binary module'; default: all")
    parser.add_argument("--tests", default="", help="regular expression of names of tests; default: all")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds of a module; default: %(default)s")
    parser.add_argument("--within", type=float, default=float("inf"), help="seconds of all; default: no limit")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("suite"), help="folder; default: %(default)s")
    parser.add_argument("--list", action="store_true", help="tell which modules there are, and run none")
    return parser.parse_args()


def main():
    options, begin = arguments(), time.monotonic()
    if options.binaries:
        files = sorted(path for path in options.binaries.iterdir() if path.is_file() and os.access(path, os.X_OK))
        binaries = {path.name: str(path) for path in files}
    else:
        binaries = built()
    found = [(name, binary, module, tests) for name, binary in sorted(binaries.items())
             for module, tests in modules_of(t for t in tests_of(binary) if re.search(options.tests, t)).items()
             if re.search(options.only, f"{name} {module}")]
    if not found:
        sys.exit(f"no test matches --only '{options.only}' and --tests '{options.tests}'")
    if options.list:
        return print(*(f"{name} {module}, {len(tests)} tests" for name, _, module, tests in found), sep="\n")
    options.out.mkdir(parents=True, exist_ok=True)
    rows = []
    for name, binary, module, tests in found:
        if time.monotonic() - begin > options.within:
            rows.append([f"{name} {module}", f"0 of {len(tests)}", "0", "not ended: left out"])
        else:
            rows.append(run_module(options, name, binary, module, tests))
        print(*rows[-1], sep=", ", flush=True)
    late = [row for row in rows if row[3].startswith("not ended")]
    wrong = [row for row in rows if row[3] and row not in late]
    told = [f"{row[0]}: {row[3]}" for row in wrong + late]
    told.append(f"{len(rows) - len(told)} of {len(rows)} modules passed; {time.monotonic() - begin:.0f} s")
    words = [[*row[:3], "failed" if row in wrong else "not ended" if row in late else ""] for row in rows]
    report(table(["module", "passed", "s", ""], words), "\n".join(told), options.out / "table.md")
    sys.exit(1 if wrong else 3 if late else 0)


if __name__ == "__main__":
    main()
