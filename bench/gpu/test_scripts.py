"""Claims about the scripts beside this file that need no card and no PyTorch: python3 -m unittest discover bench/gpu"""

import unittest

import batches
import runs


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


if __name__ == "__main__":
    unittest.main()
