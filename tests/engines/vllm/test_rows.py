import numpy as np

from ridgefill.engines.vllm.rows import Part, Run, exact_rows, runs_of


def test_leading_rows_the_tail_and_what_was_generated_are_exact():
    whole = exact_rows(0, 24, 20, tail=4, leading=3)
    assert whole.nonzero()[0].tolist() == [0, 1, 2, *range(16, 24)]
    chunks = [exact_rows(start, 5, 20, 4, 3) for start in range(0, 20, 5)]
    assert np.concatenate(chunks).tolist() == whole[:20].tolist()


def test_chosen_rows_are_exact_wherever_the_chunk_begins():
    chosen = np.zeros(16, bool)
    chosen[[5, 9, 10]] = True
    whole = exact_rows(0, 20, 20, 4, 0, chosen)
    assert whole.nonzero()[0].tolist() == [5, 9, 10, 16, 17, 18, 19]
    assert exact_rows(7, 6, 20, 4, 0, chosen).tolist() == whole[7:13].tolist()


def test_consecutive_rows_are_one_request_to_attention():
    assert list(runs_of(2, np.array([0, 1, 2, 7, 8, 19]))) == [Run(2, 3, 3), Run(2, 2, 9), Run(2, 1, 20)]
    assert list(runs_of(0, np.array([], int))) == []


def test_a_part_counts_what_it_fills():
    exact = np.array([True, False, False])
    assert Part(0, 0, 0, 3, exact).fills == 2
    assert Part(0, 0, 0, 3, exact, read=3, whole=True).fills == 0
