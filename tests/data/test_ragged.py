"""Ragged columns: the padded view, the cuts, and runs that behave as the values they stand for."""

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cadenza.data.ragged import Array, Positions, Ragged


def padded_slowly(ragged: Ragged) -> Array:
    padded = np.full((len(ragged), ragged.width), ragged.pad, ragged.dtype)
    for i in range(len(ragged)):
        for j, value in enumerate(ragged[i]):
            padded[i, j] = value
    return padded


@st.composite
def raggeds(draw: st.DrawFn) -> Ragged:
    dtype, pad = draw(st.sampled_from([(np.int32, -1), (np.int32, 0), (np.float32, np.nan), (np.bool_, 0)]))
    if draw(st.booleans()):
        rows = draw(st.lists(st.lists(st.integers(0, 9), max_size=6), max_size=6))
    else:
        # Wide enough for the row by row copy, and often equally long.
        rows = [[3] * n for n in draw(st.lists(st.sampled_from([0, 600, 601]), max_size=3))]
    return Ragged.from_rows(rows, dtype=dtype, pad=pad)


@st.composite
def runs(draw: st.DrawFn) -> tuple[Ragged, Ragged]:
    """A column kept as runs, and the same column with its values written out."""
    pairs = draw(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 4)), max_size=12))
    values = np.array([value for value, _ in pairs], np.int32)
    counts = np.array([count for _, count in pairs], np.int64)
    total = int(counts.sum())
    cuts = sorted(draw(st.lists(st.integers(0, total), max_size=6)))
    offsets = [0, *cuts, total]
    return Ragged.from_runs(values, counts, offsets, pad=-1), Ragged(np.repeat(values, counts), offsets, pad=-1)


@given(raggeds())
def test_the_padded_view_equals_a_slow_loop(ragged: Ragged) -> None:
    np.testing.assert_array_equal(ragged.padded, padded_slowly(ragged))
    assert ragged.padded.dtype == ragged.dtype


@given(raggeds())
def test_a_padded_view_leads_back_to_its_rows(ragged: Ragged) -> None:
    assert Ragged.from_padded(ragged.padded, ragged.offsets, pad=ragged.pad) == ragged


@given(raggeds(), st.data())
def test_taking_and_slicing_rows_gives_those_rows(ragged: Ragged, data: st.DataObject) -> None:
    rows = data.draw(st.lists(st.integers(0, len(ragged) - 1), max_size=8)) if len(ragged) else []
    taken = ragged.take(np.array(rows, np.int64))
    assert [row.tolist() for row in taken] == [ragged[i].tolist() for i in rows]
    start, stop = sorted(data.draw(st.tuples(*[st.integers(0, len(ragged))] * 2)))
    assert [row.tolist() for row in ragged.slice(start, stop)] == [ragged[i].tolist() for i in range(start, stop)]


@given(runs(), st.data())
def test_runs_behave_as_the_values_they_stand_for(pair: tuple[Ragged, Ragged], data: st.DataObject) -> None:
    kept, written = pair
    np.testing.assert_array_equal(kept.padded, padded_slowly(written))
    assert kept == written
    rows = np.array(data.draw(st.lists(st.integers(0, len(written) - 1), max_size=8)), np.int64)
    np.testing.assert_array_equal(kept.take(rows).padded, written.take(rows).padded)
    start, stop = sorted(data.draw(st.tuples(*[st.integers(0, len(written))] * 2)))
    assert kept.slice(start, stop) == written.slice(start, stop)
    np.testing.assert_array_equal(
        Ragged.concat([kept, kept.take(rows)]).padded, Ragged.concat([written, written.take(rows)]).padded
    )
    assert Ragged.concat([kept, written]) == Ragged.concat([written, kept])
    assert pickle.loads(pickle.dumps(kept)) == written


def test_equally_long_rows_are_padded_without_a_copy() -> None:
    ragged = Ragged(np.arange(6, dtype=np.int32), [0, 3, 6])
    assert np.shares_memory(ragged.padded, ragged.values)


def test_the_padded_view_is_made_once() -> None:
    ragged = Ragged(np.arange(3, dtype=np.int32), [0, 1, 3])
    assert ragged.padded is ragged.padded


def test_a_slice_shares_memory() -> None:
    ragged = Ragged(np.arange(6, dtype=np.int32), [0, 1, 4, 6])
    assert np.shares_memory(ragged.slice(1, 3).values, ragged.values)


def test_runs_are_pickled_as_runs_also_after_they_were_expanded() -> None:
    mask = Ragged.from_runs(np.array([False, True]), [100_000, 100_000], [0, 150_000, 200_000])
    assert mask.values.nbytes == 200_000
    assert mask.padded.nbytes == 300_000
    assert mask.nbytes < 200
    assert len(pickle.dumps(mask)) < 2_000


def test_a_pad_that_the_dtype_cannot_hold_is_refused() -> None:
    with pytest.raises(ValueError, match="pad nan does not fit int32"):
        Ragged.from_rows([[1]], dtype=np.int32, pad=np.nan)
    with pytest.raises(ValueError, match="pad -1 does not fit bool"):
        Ragged.from_rows([[1]], dtype=np.bool_, pad=-1)
    with pytest.raises(ValueError, match="pad 300 does not fit uint8"):
        Ragged.from_rows([[1]], dtype=np.uint8, pad=300)


@pytest.mark.parametrize(
    ("offsets", "message"),
    [([1, 3], "start at 0"), ([], "start at 0"), ([0, 2, 1, 3], "must not decrease"), ([0, 2], "end at 2")],
)
def test_offsets_that_do_not_cover_the_values_are_refused(offsets: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Ragged(np.arange(3), offsets)


def test_runs_that_do_not_cover_the_offsets_are_refused() -> None:
    with pytest.raises(ValueError, match="offsets end at 3, there are 5 values"):
        Ragged.from_runs(np.array([1, 2]), [2, 3], [0, 3])
    with pytest.raises(ValueError, match="one count per value"):
        Ragged.from_runs(np.array([1, 2]), [2], [0, 2])
    with pytest.raises(ValueError, match=">= 0, got -1"):
        Ragged.from_runs(np.array([1, 2]), [3, -1], [0, 2])


def test_rows_without_a_common_dtype_are_refused() -> None:
    with pytest.raises(TypeError, match="row 1 is float32, row 0 is int32"):
        Ragged.from_rows([np.zeros(1, np.int32), np.zeros(1, np.float32)])
    with pytest.raises(TypeError, match="pass dtype="):
        Ragged.from_rows([[1, 2]])
    with pytest.raises(ValueError, match="no rows, so no dtype"):
        Ragged.from_rows([])
    with pytest.raises(ValueError, match="row 0 of a ragged column must be 1-D"):
        Ragged.from_rows([[[1]]], dtype=np.int32)


def test_columns_with_another_pad_do_not_join() -> None:
    zero = Ragged.from_rows([[1.0]], dtype=np.float32)
    with pytest.raises(ValueError, match="padded with nan does not continue"):
        Ragged.concat([zero, Ragged.from_rows([[1.0]], dtype=np.float32, pad=np.nan)])
    assert zero != Ragged.from_rows([[1.0]], dtype=np.float64)


def test_a_row_outside_is_an_index_error() -> None:
    ragged = Ragged.from_rows([[1], [2, 3]], dtype=np.int32)
    assert ragged[-1].tolist() == [2, 3]
    with pytest.raises(IndexError, match="row 2 of a ragged column with 2 rows"):
        ragged[2]


@given(lengths=st.lists(st.integers(0, 9), max_size=8))
def test_positions_count_from_zero_in_every_row_and_store_only_the_offsets(lengths: list[int]) -> None:
    offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)
    plain = Ragged.from_rows([np.arange(length, dtype=np.int32) for length in lengths], dtype=np.int32)
    positions = Positions(offsets)
    assert positions == plain
    assert np.array_equal(positions.padded, plain.padded)
    assert positions.nbytes == offsets.nbytes
    rows = np.arange(len(lengths))[::-1]
    assert isinstance(positions.take(rows), Positions)
    assert positions.take(rows) == plain.take(rows)
    assert Ragged.concat([positions, positions]) == Ragged.concat([plain, plain])
    assert pickle.loads(pickle.dumps(positions)) == plain
    if lengths:
        assert positions.slice(1, len(lengths)) == plain.slice(1, len(lengths))
