"""Claims about the scripts beside this file that need no card and no PyTorch: python3 -m unittest discover bench/gpu"""

import argparse
import json
import math
import pathlib
import subprocess
import tempfile
import time
import unittest

import batches
import compare
import overlap
import runs
import sanitize
import scaling
import suite


class Batches(unittest.TestCase):
    def test_the_order_is_the_one_that_the_data_crate_pins(self):
        self.assertEqual([batches.sample_at(p, 10, 42) for p in range(12)], [1, 7, 3, 4, 2, 5, 6, 8, 9, 0, 2, 0])
        self.assertEqual([batches.sample_at(p, 1000, 0) for p in (0, 999, 1000, 123_456_789)], [935, 526, 448, 221])

    def test_the_end_of_an_epoch_that_fills_no_batch_is_passed_over(self):
        self.assertEqual(list(batches.batch_positions(10, 4, 5)), [0, 4, 10, 14, 20])
        self.assertEqual(list(batches.batch_positions(8, 4, 4)), [0, 4, 8, 12])

    def test_windows_share_one_token_with_their_neighbours(self):
        windows = sorted(next(batches.batches(bytes(range(13)), 4, 3, 1, 1)))
        self.assertEqual(windows, [bytes(range(0, 5)), bytes(range(4, 9)), bytes(range(8, 13))])
        with self.assertRaisesRegex(SystemExit, "12 tokens make 2 windows"):
            next(batches.batches(bytes(12), 4, 3, 1, 1))


class Runs(unittest.TestCase):
    def lines(self, seconds):
        return [{"seconds": each} for each in seconds]

    def test_first_and_last_steps_and_those_of_the_warm_up_do_not_count(self):
        steps = [9.0] * runs.FIRST_STEPS + [2.0] * 5 + [1.0] * 20 + [9.0] * runs.LAST_STEPS
        self.assertEqual(runs.step_seconds(self.lines(steps), 10.0), 1.0)

    def test_a_window_in_which_the_machine_did_other_things_does_not_count(self):
        steps = [1.0] * runs.FIRST_STEPS + [1.0] * 8 + [50.0] * 2 + [1.0] * 10 + [1.0] * runs.LAST_STEPS
        self.assertEqual(runs.step_seconds(self.lines(steps), 0.0), 1.0)

    def test_too_few_steps_are_an_error_that_says_so(self):
        with self.assertRaisesRegex(runs.Failed, "2 steps are left behind 10.0 s"):
            runs.step_seconds(self.lines([5.0] * (runs.FIRST_STEPS + 4 + runs.LAST_STEPS)), 10.0)

    def test_a_table_is_markdown_with_numbers_to_the_right(self):
        text = runs.table(["", "rate"], [["a", "1"], ["long", "12345"]])
        self.assertEqual(text.splitlines(), ["|      |  rate |", "|------|------:|", "| a    |     1 |", "| long | 12345 |"])


class Overlap(unittest.TestCase):
    # Rank 0 computes from 0 to 10 and from 12 to 14 and communicates from 8 to 13; rank 1 communicates alone.
    SLICES = [(1, 1, "op", "a", 0, 6), (1, 1, "op", "b", 5, 10), (1, 2, "joint", "c", 8, 13), (1, 1, "graph", "g", 12, 14),
              (2, 1, "joint", "c", 8, 13)]

    def test_communication_is_exposed_where_nothing_else_of_its_rank_runs(self):
        self.assertEqual(runs.exposed(self.SLICES), {0: (5, 2), 1: (5, 5)})

    def test_a_picture_has_a_row_for_each_rank_and_stream(self):
        events = [{"ph": "X", "pid": p, "tid": t, "cat": k, "name": n, "ts": s, "dur": e - s} for p, t, k, n, s, e in self.SLICES]
        events.append({"ph": "M", "name": "thread_name", "pid": 1, "tid": 2, "args": {"name": "1 reduce"}})
        picture = overlap.svg(events, "a & b")
        self.assertEqual((picture.count("<rect"), picture.count("rank 0, "), picture.count("rank 1, ")), (5, 2, 1))
        self.assertIn("rank 0, 1 reduce", picture)
        self.assertIn("a &amp; b", picture)

    def test_layouts_are_read_and_what_is_none_is_refused(self):
        self.assertEqual(runs.layout_settings("tp2gtp4"), {"layout.dp": 1, "layout.tp": 2, "layout.gtp": 4})
        for wrong in ("dp", "pp2", "tp2x"):
            with self.assertRaises(SystemExit):
                runs.layout_settings(wrong)


class Scaling(unittest.TestCase):
    def options(self, **given):
        return argparse.Namespace(**({"sizes": ["124m"], "gpus": [8], "ways": list(scaling.WAYS), "torch": ["ddp"]} | given))

    def test_layouts_use_every_card_and_cut_no_head(self):
        for gpus in (1, 2, 3, 4, 6, 8):
            for heads in (4, 12, 16):
                for layout in scaling.layouts(gpus, heads):
                    settings = runs.layout_settings(layout)
                    ranks = math.prod(settings.get(f"layout.{axis}", 1) for axis in ("tp", "gtp", "dp"))
                    self.assertEqual((ranks, heads % settings.get("layout.tp", 1)), (gpus, 0), layout)
        self.assertEqual(scaling.layouts(8, 12), ["dp8", "gtp8", "tp4dp2", "tp2gtp2dp2"])
        self.assertEqual(scaling.layouts(8, 16)[2], "tp8")

    def test_gates_before_replays_are_tried_where_replicas_publish(self):
        before = [layout for _, _, layout, way in scaling.plan(self.options()) if way == "gates before"]
        self.assertEqual(before, ["dp8", "tp4dp2", "tp2gtp2dp2"])
        self.assertEqual(scaling.plan(self.options(gpus=[1], ways=["eager"])),
                         [("124m", 1, "dp1", "eager"), ("124m", 1, "ddp", "torch")])

    def test_the_batch_grows_with_the_cards_and_replicas_share_the_optimizer(self):
        settings = scaling.settings_of(("124m", 8, "tp4dp2", "replayed"), "cuda")
        self.assertEqual((settings["train.global_batch"], settings["optimizer.distributed"]), (256, "true"))
        self.assertEqual(scaling.settings_of(("124m", 8, "gtp8", "eager"), "cuda")["optimizer.distributed"], "false")

    def test_efficiency_is_held_against_one_card_of_the_same_way(self):
        runs_of = {("124m", 1, "dp1", "eager"): 0.1, ("124m", 1, "dp1", "replayed"): 0.08, ("124m", 8, "dp8", "eager"): 0.125,
                   ("124m", 8, "dp8", "gates before"): 0.1, ("124m", 8, "dp8", "replayed"): 0.082, ("124m", 8, "gtp8", "replayed"): 0.1,
                   ("124m", 8, "ddp", "torch"): 0.123}
        results = {one: {"seconds": seconds} for one, seconds in runs_of.items()}
        share = lambda *one: scaling.efficiency(one, results)
        self.assertAlmostEqual(share("124m", 8, "dp8", "eager"), 0.8)
        self.assertAlmostEqual(share("124m", 8, "dp8", "gates before"), 0.8)
        self.assertIsNone(share("124m", 8, "ddp", "torch"))
        self.assertEqual([line.split(": ")[-1] for line in scaling.aims(results)], ["reached", "missed"])
        self.assertEqual(scaling.row(("124m", 8, "dp8", "replayed"), results)[3:5], ["1.500", "-"])

    def test_a_folder_with_results_of_other_settings_is_refused(self):
        with tempfile.TemporaryDirectory() as folder:
            path, one = pathlib.Path(folder) / "results.jsonl", ("124m", 1, "dp1", "eager")
            self.assertEqual(scaling.known_results(path, {"set": []}), {})
            path.write_text(json.dumps({"run": one, "how": {"set": []}, "result": {"seconds": 1.0}}) + "\n")
            self.assertEqual(scaling.known_results(path, {"set": []}), {one: {"seconds": 1.0}})
            with self.assertRaisesRegex(SystemExit, "give another --out"):
                scaling.known_results(path, {"set": ["train.seed=2"]})

    def test_a_plan_without_memory_is_an_error(self):
        self.assertEqual(scaling.planned_bytes("842496 parameters on 4 ranks, 28.5 MiB each:"), 28.5 * 2**20)
        with self.assertRaisesRegex(runs.Failed, "no memory of a rank"):
            scaling.planned_bytes("nothing")


class Compare(unittest.TestCase):
    def result(self, seconds, gib):
        return {"ours": {"seconds": seconds, "memory": gib * 2**30}, "torch": None, "llm.c, scaled": 568_300.0}

    def test_aims_are_met_with_the_rate_and_no_more_memory(self):
        cells, met = compare.row("32x1024", self.result(0.05, 14.8))
        self.assertEqual((cells[1], cells[2], cells[4], met), ("655,360", "-", "1.153", True))
        self.assertFalse(compare.row("32x1024", self.result(0.05, 14.9))[1])
        self.assertFalse(compare.row("32x1024", self.result(0.056, 14.0))[1])

    def test_the_ratio_is_to_the_better_peer(self):
        result = self.result(0.05, 14.8) | {"torch": {"seconds": 0.048, "memory": 2**30}}
        self.assertEqual(compare.row("32x1024", result)[0][4], "0.960")


class Sanitize(unittest.TestCase):
    def test_findings_failed_tests_and_tools_that_did_not_run_are_told_apart(self):
        ok = "test result: ok. 1 passed; 0 failed\n"
        clean = "========= ERROR SUMMARY: 0 errors\n"
        self.assertEqual(sanitize.verdict("memcheck", 0, ok + clean), sanitize.CLEAN)
        self.assertEqual(sanitize.verdict("memcheck", 9, ok + "========= ERROR SUMMARY: 3 errors"), "3 found")
        self.assertEqual(sanitize.verdict("racecheck", 0, ok + "RACECHECK SUMMARY: 0 hazards displayed (0 errors)"), "clean")
        self.assertEqual(sanitize.verdict("memcheck", 101, "test result: FAILED. 0 passed" + clean), "test failed")
        self.assertIn("not run", sanitize.verdict("memcheck", 1, "Error: no permission"))
        self.assertEqual(sanitize.verdict("memcheck", 0, "test result: ok. 0 passed" + clean), "ended with 0")

    def test_a_test_that_is_late_goes_with_the_tool_that_started_it(self):
        self.assertEqual(sanitize.ended_within(20, ["sh", "-c", "echo out; echo err >&2; exit 3"], None), (3, "out\nerr\n"))
        begin = time.monotonic()
        code, text = sanitize.ended_within(0.5, ["sh", "-c", "sleep 60 & echo $!; wait"], None)
        self.assertIsNone(code)
        self.assertLess(time.monotonic() - begin, 30, "it was waited for")
        for _ in range(100):
            state = subprocess.run(["ps", "-o", "stat=", text.strip()], capture_output=True, text=True).stdout.strip()
            if state[:1] in ("", "Z"):
                return
            time.sleep(0.1)
        self.fail(f"process {text.strip()} is still there: {state}")


class Suite(unittest.TestCase):
    def test_modules_are_the_first_two_parts_and_what_has_none_is_one_by_itself(self):
        names = ["api::joint::cuda::a", "api::joint::sim::b", "runs::c", "runs::d", "loose"]
        self.assertEqual(suite.modules_of(names), {"api::joint": names[:2], "runs": names[2:4], "loose": ["loose"]})

    def test_tests_are_taken_from_what_cargo_tells_and_examples_and_benches_are_not(self):
        def line(kind, name, executable="x", test=True):
            return json.dumps({"reason": "compiler-artifact", "package_id": "path+file:///w/crates/gtp#0.1.0", "executable": executable,
                               "profile": {"test": test}, "target": {"kind": [kind], "name": name}})
        lines = [line("lib", "gtp", "l"), line("test", "api", "t"), line("example", "e"), line("bench", "b"),
                 line("lib", "gtp", None), line("test", "other", "o", False), "warning: no JSON"]
        self.assertEqual(suite.binaries_of(lines), {"gtp_lib": "l", "gtp_api": "t"})

    def test_failures_crashes_and_what_did_not_end_are_told_with_the_test(self):
        ok = "test a ... ok\ntest b ... ok\n"
        self.assertEqual(suite.verdict(0, ok + "test result: ok. 2 passed; 0 failed; 0 ignored\n", 2), (2, ""))
        self.assertEqual(suite.verdict(0, ok + "test result: ok. 2 passed; 0 failed; 0 ignored\n", 3), (2, "ended with 0, 2 of 3 ran"))
        failed = "test a ... ok\ntest b ... FAILED\n\nfailures:\n\n---- b stdout ----\n    c\n\n\nfailures:\n    b\n\ntest result: FAILED. 1 passed; 1 failed\n"
        self.assertEqual(suite.verdict(101, failed, 2), (1, "failed: b"))
        self.assertEqual(suite.verdict(None, "test a ... ok\ntest b ... ", 2), (1, "not ended in b"))
        self.assertEqual(suite.verdict(-11, "test a ... ok\ntest b ... noise\n", 2), (1, "ended with -11 in b"))
        self.assertEqual(suite.verdict(None, "", 2), (0, "not ended"))


if __name__ == "__main__":
    unittest.main()
