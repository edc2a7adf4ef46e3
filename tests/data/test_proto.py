"""DataProto: rows stay together through every operation, and errors name the column at fault."""

import json
import pickle
import subprocess
import sys
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from data_cases import rows_of, small, train_batch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cadenza.data import DataProto
from cadenza.data.ragged import Ragged
from cadenza.data.schema import TRAIN_BATCH, Column, Schema, SchemaError

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=3,
)


@st.composite
def protos(draw: st.DrawFn, min_rows: int = 0) -> DataProto:
    rows = draw(st.integers(min_rows, 7))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    lengths = rng.integers(0, 5, rows)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    total = int(offsets[-1])
    tensors: dict[str, Any] = {
        "ids": Ragged(rng.integers(0, 9, total).astype(np.int32), offsets),
        "mask": Ragged.from_runs(np.array([True, False]), [total // 2, total - total // 2], offsets),
        "step_scores": Ragged.from_rows([rng.random(n) for n in lengths], dtype=np.float32, pad=np.nan),
        "score": np.where(rng.random(rows) < 0.3, np.nan, rng.random(rows)).astype(np.float32),
        "pixels": rng.integers(0, 255, (rows, 2, 2)).astype(np.uint8),
    }
    names = draw(st.lists(st.sampled_from(sorted(tensors)), min_size=1, unique=True))
    objects = {"note": draw(st.lists(json_values, min_size=rows, max_size=rows))}
    meta = draw(st.dictionaries(st.text(max_size=3), json_values, max_size=2))
    return DataProto({name: tensors[name] for name in names}, objects, meta)


# Properties


@given(protos(min_rows=1), st.data())
def test_chunks_join_to_what_was_cut(data: DataProto, draw: st.DataObject) -> None:
    n = draw.draw(st.integers(1, len(data)))
    chunks = data.chunk(n)
    sizes = [len(chunk) for chunk in chunks]
    assert len(chunks) == n
    assert max(sizes) - min(sizes) <= 1
    assert DataProto.concat(chunks) == data


@given(protos(min_rows=1), st.integers(1, 9))
def test_splits_join_to_what_was_cut(data: DataProto, size: int) -> None:
    parts = data.split(size)
    assert all(len(part) == size for part in parts[:-1])
    assert DataProto.concat(parts) == data


@given(protos(min_rows=1), st.integers(1, 9), st.randoms(use_true_random=False))
def test_unpadding_undoes_padding_even_after_a_reorder(data: DataProto, k: int, random: Any) -> None:
    padded, count = data.pad_to_multiple(k)
    assert len(padded) % k == 0
    assert 0 <= count < k
    assert padded.batch.numpy("is_padding").sum() == count
    assert padded.unpad(count) == data
    order = sorted(range(len(padded)), key=lambda _: random.random())
    kept = [i for i in order if i < len(data)]
    assert padded.reorder(order).unpad(count) == data[kept]


@given(protos(), st.randoms(use_true_random=False))
def test_the_inverse_order_undoes_a_reorder(data: DataProto, random: Any) -> None:
    order = list(range(len(data)))
    random.shuffle(order)
    assert data.reorder(order).reorder(np.argsort(order)) == data


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=protos())
def test_a_batch_comes_back_from_disk_as_it_went(tmp_path_factory: pytest.TempPathFactory, data: DataProto) -> None:
    directory = tmp_path_factory.mktemp("disk") / "batch"
    data.to_disk(directory)
    loaded = DataProto.from_disk(directory)
    assert loaded == data
    assert list(loaded.batch) == list(data.batch)


@given(protos())
def test_pickle_5_ships_the_buffers_out_of_band(data: DataProto) -> None:
    buffers: list[pickle.PickleBuffer] = []
    frame = pickle.dumps(data, protocol=5, buffer_callback=buffers.append)
    assert buffers
    assert pickle.loads(frame, buffers=[bytes(buffer.raw()) for buffer in buffers]) == data


@given(protos(min_rows=1), st.data())
def test_a_mask_an_index_and_a_slice_choose_the_same_rows(data: DataProto, draw: st.DataObject) -> None:
    start, stop = sorted(draw.draw(st.tuples(*[st.integers(0, len(data))] * 2)))
    mask = np.zeros(len(data), np.bool_)
    mask[start:stop] = True
    assert data[mask] == data[start:stop] == data[list(range(start, stop))] == data[torch.arange(start, stop)]


# Columns as tensors


def test_torch_is_not_imported_until_a_tensor_is_read() -> None:
    program = """
import sys, numpy as np
from cadenza.data import DataProto
from cadenza.data.schema import TRAIN_BATCH
data = DataProto({"ids": [np.array([1, 2]), np.array([3])]}, {"task": ["a", "b"]})
data, _ = DataProto.concat(data.repeat(2).chunk(2)).reorder([3, 2, 1, 0]).pad_to_multiple(3)
data.batch.numpy("ids"), data.group_by("task"), repr(data), data == data
assert "torch" not in sys.modules
data.batch["ids"]
assert "torch" in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_saving_needs_no_torch(tmp_path: Path) -> None:
    program = f"""
import sys, numpy as np
from cadenza.data import DataProto
DataProto({{"ids": [np.array([1, 2])]}}).to_disk({str(tmp_path / "batch")!r})
DataProto.from_disk({str(tmp_path / "batch")!r})
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_rows_and_columns_of_a_batch_on_a_device_are_on_it_and_a_shipped_copy_is_not() -> None:
    moved = small().to("meta")
    chosen = [moved[1:], moved[[2, 0]], moved.select(["input_ids"]), moved.repeat(2), DataProto.concat([moved, moved])]
    chosen += [moved.rename({"input_ids": "ids"}), moved.pad_to_multiple(2)[0]]
    assert {tensor.device.type for data in chosen for tensor in data.batch.values()} == {"meta"}
    shipped = pickle.loads(pickle.dumps(moved))
    assert {tensor.device.type for tensor in shipped.batch.values()} == {"cpu"}


def test_a_device_that_does_not_exist_is_refused_at_once() -> None:
    with pytest.raises(RuntimeError, match="warp"):
        small().to("warp")


# What is refused


@pytest.mark.parametrize("size", [0, -1])
def test_sizes_below_one_are_refused(size: int) -> None:
    data = small()
    for operation in (data.chunk, data.split, data.repeat, data.mini_batches, data.pad_to_multiple):
        with pytest.raises(ValueError, match=f"must be >= 1, got {size}"):
            operation(size)
    with pytest.raises(ValueError, match=f"epochs must be >= 1, got {size}"):
        data.mini_batches(1, epochs=size)


def test_more_chunks_than_rows_are_refused() -> None:
    with pytest.raises(ValueError, match=r"cannot cut 3 rows into 4 chunks: .*pad_to_multiple\(4\)"):
        small().chunk(4)


@pytest.mark.parametrize(
    ("index", "error", "message"),
    [
        (3, IndexError, "row 3 is outside the batch of 3 rows"),
        (-4, IndexError, "row -4 is outside"),
        ([0, 5], IndexError, "row 5 is outside"),
        ([True, False], IndexError, "the mask has 2 rows, the batch has 3"),
        ([0.5], TypeError, "must be integers or bools, got float64"),
        ([[0]], ValueError, "must be 1-D"),
        ("scores", TypeError, "read 'scores' from .batch"),
    ],
)
def test_a_bad_row_index_is_refused(index: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        small()[index]


def test_a_reorder_that_loses_or_repeats_rows_is_refused() -> None:
    for order in ([0, 1], [0, 0, 1], [0, 1, 2, 2]):
        with pytest.raises(ValueError, match="each of the 3 rows once"):
            small().reorder(order)


# Rows


def test_an_int_gives_one_row_with_all_columns() -> None:
    row = small()[-1]
    assert len(row) == 1
    assert row.batch["input_ids"].tolist() == [[1, 2, 3]]
    assert row.non_tensor_batch["task"].tolist() == ["a"]
    assert row.meta_info == {"global_step": 7}


def test_negative_steps_and_empty_choices_work() -> None:
    assert small()[::-1].non_tensor_batch["task"].tolist() == ["a", "b", "a"]
    assert small()[::-1].batch["scores"].tolist() == [0.0, 1.0, 0.5]
    assert len(small()[[]]) == len(small()[2:1]) == 0
    assert small()[[]].batch["input_ids"].shape == (0, 0)


def test_repeat_keeps_copies_together_or_cycles() -> None:
    data = small()[:2]
    assert data.repeat(2).non_tensor_batch["task"].tolist() == ["a", "a", "b", "b"]
    assert data.repeat(2, interleave=False).non_tensor_batch["task"].tolist() == ["a", "b", "a", "b"]


def test_groups_come_in_first_seen_order() -> None:
    data = DataProto({"id": np.array([9, 2, 9])}, {"task": ["z", "a", "z"]})
    assert list(data.group_by("id")) == [9, 2]
    groups = data.group_by("task")
    assert list(groups) == ["z", "a"]
    assert groups["z"].batch["id"].tolist() == [9, 9]


def test_group_by_needs_one_hashable_value_per_row() -> None:
    with pytest.raises(ValueError, match=r"'input_ids' is ragged int32 .* needs one value per row"):
        small().group_by("input_ids")
    with pytest.raises(TypeError, match="column 'x', row 0 is an unhashable list"):
        DataProto(non_tensor_batch={"x": [[1]]}).group_by("x")


def test_mini_batches_visit_every_row_once_per_epoch() -> None:
    data = DataProto({"id": np.arange(5)})
    batches = [part.batch["id"].tolist() for part in data.mini_batches(2, epochs=2, seed=3)]
    first, second = [*chain(*batches[:3])], [*chain(*batches[3:])]
    assert sorted(first) == sorted(second) == [0, 1, 2, 3, 4]
    assert first != second
    again = [part.batch["id"].tolist() for part in data.mini_batches(2, epochs=2, seed=3)]
    assert again == batches


def test_mini_batches_without_a_seed_come_in_order() -> None:
    data = DataProto({"id": np.arange(5)})
    assert [p.batch["id"].tolist() for p in data.mini_batches(2)] == [[0, 1], [2, 3], [4]]
    assert [p.batch["id"].tolist() for p in data.mini_batches(2, drop_last=True)] == [[0, 1], [2, 3]]
    with pytest.raises(ValueError, match="drops all 5 rows"):
        data.mini_batches(6, drop_last=True)


def test_padding_rows_are_marked_so_no_loss_counts_them() -> None:
    padded, count = small().pad_to_multiple(4)
    assert count == 1
    counted = ~padded.batch["is_padding"]
    assert padded.batch["scores"][counted].tolist() == small().batch["scores"].tolist()
    assert padded.chunk(4)[3].batch["is_padding"].tolist() == [True]


def test_the_padding_mark_is_there_also_when_nothing_was_added() -> None:
    padded, count = small().pad_to_multiple(3)
    assert count == 0
    assert padded.batch["is_padding"].tolist() == [False] * 3
    assert "is_padding" not in small().batch


def test_padding_goes_round_when_a_batch_is_smaller_than_its_padding() -> None:
    padded, count = small()[:2].pad_to_multiple(7)
    assert count == 5
    assert padded.non_tensor_batch["task"].tolist() == ["a", "b"] * 3 + ["a"]


def test_padding_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="'is_padding' already: unpad it first"):
        small().pad_to_multiple(2)[0].pad_to_multiple(4)


def test_unpadding_another_number_than_was_marked_is_refused() -> None:
    padded, _ = small().pad_to_multiple(4)
    with pytest.raises(ValueError, match=r"unpad\(2\), but 'is_padding' marks 1 rows"):
        padded.unpad(2)
    with pytest.raises(ValueError, match=r"must be in 0\.\.4, .* got 5"):
        padded.unpad(5)


def test_a_result_without_the_mark_loses_its_last_rows() -> None:
    padded, count = small().pad_to_multiple(4)
    assert padded.select(["scores"]).unpad(count) == small().select(["scores"])


# Columns and meta_info


def test_concat_names_the_columns_that_are_not_shared() -> None:
    with pytest.raises(ValueError, match=r"chunk 1 and chunk 0 do not share the columns \['scores'\]"):
        DataProto.concat([small(), small().select(["input_ids"])])
    with pytest.raises(ValueError, match="at least one"):
        DataProto.concat([])


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (np.zeros(3), r"column 'scores' is float64 \[3\] in chunk 1, float32 \[3\] in chunk 0"),
        (np.zeros((3, 1), np.float32), r"column 'scores' is float32 \[3, 1\] in chunk 1"),
        ([np.zeros(1, np.float32)] * 3, r"column 'scores' is ragged float32 .* in chunk 1"),
    ],
)
def test_concat_does_not_convert_columns(other: Any, message: str) -> None:
    part = small()
    part.batch["scores"] = other
    with pytest.raises(ValueError, match=message):
        DataProto.concat([small(), part])


def test_conflicting_meta_info_is_an_error_unless_dropped() -> None:
    first, second = small(), small()
    second.meta_info = {"global_step": 8, "worker": 1}
    with pytest.raises(ValueError, match=r"meta_info\['global_step'\] is 7 and 8"):
        DataProto.concat([first, second])
    assert DataProto.concat([first, second], on_meta_conflict="drop").meta_info == {"worker": 1}


def test_select_keeps_all_of_a_kind_it_is_not_asked_about() -> None:
    part = small().select(batch_keys=["scores"], non_tensor_batch_keys=[])
    assert (list(part.batch), list(part.non_tensor_batch), part.meta_info) == (
        ["scores"],
        [],
        {"global_step": 7},
    )


def test_pop_moves_columns_or_nothing_at_all() -> None:
    data = small()
    popped = data.pop(["scores"], meta_info_keys=["global_step"])
    assert (list(data.batch), data.meta_info) == (["input_ids"], {})
    assert (list(popped.batch), popped.meta_info) == (["scores"], {"global_step": 7})
    with pytest.raises(KeyError, match="no object column 'x'"):
        data.pop(["input_ids"], ["x"])
    assert list(data.batch) == ["input_ids"]


def test_union_joins_columns_and_refuses_a_difference() -> None:
    data = small()
    values = DataProto({"values": np.ones(3), "scores": data.batch["scores"]}, meta_info={"seed": 1})
    joined = data.union(values)
    assert list(joined.batch) == ["input_ids", "scores", "values"]
    assert joined.meta_info == {"global_step": 7, "seed": 1}
    with pytest.raises(ValueError, match="column 'scores' differs"):
        data.union(DataProto({"scores": np.ones(3, np.float32)}))
    with pytest.raises(ValueError, match="column 'values' has 2 rows, the batch has 3"):
        data.union(DataProto({"values": np.ones(2)}))
    with pytest.raises(ValueError, match=r"union: meta_info\['global_step'\]"):
        data.union(DataProto(meta_info={"global_step": 1}))


def test_rename_keeps_the_order_and_refuses_a_collision() -> None:
    renamed = small().rename({"input_ids": "tokens", "task": "name"})
    assert list(renamed.columns) == ["tokens", "scores", "name"]
    assert list(small().rename({"input_ids": "scores", "scores": "input_ids"}).batch) == [
        "scores",
        "input_ids",
    ]
    with pytest.raises(ValueError, match="two columns would be called 'scores'"):
        small().rename({"task": "scores"})
    with pytest.raises(KeyError, match="no column 'x'"):
        small().rename({"x": "y"})


def test_changing_a_part_leaves_the_columns_and_meta_info_of_the_whole() -> None:
    data = small()
    part = data[:]
    part.meta_info["global_step"] = 8
    part.batch["scores"] = np.zeros(3)
    del part.non_tensor_batch["task"]
    assert data == small()


def test_a_batch_without_columns_carries_meta_info() -> None:
    data = DataProto(meta_info={"global_step": 1})
    assert len(data) == 0
    data.batch["x"] = np.zeros(4)
    assert len(data) == 4


def test_batches_differ_by_dtype_content_and_meta_info() -> None:
    assert small() != small()[:2]
    assert small() != small().select(meta_info_keys=[])
    assert DataProto({"x": np.zeros(1, np.int32)}) != DataProto({"x": np.zeros(1, np.int64)})
    assert DataProto({"x": np.zeros((1, 1))}) != DataProto({"x": [np.zeros(1)]})
    assert DataProto({"x": np.array([np.nan])}) == DataProto({"x": np.array([np.nan])})


def test_the_repr_is_a_table_of_columns() -> None:
    assert repr(small()).splitlines() == [
        "DataProto: 3 rows, 68 bytes, meta_info: global_step",
        "  input_ids  ragged int32 [3, 3], lengths 1..3 (mean 2.0)",
        "  scores     float32 [3]",
        "  task       object [3]",
    ]
    assert "ragged int32 [0, 0]" in repr(small()[[]])


# Transport and disk


def test_neither_torch_nor_padding_travels() -> None:
    data = DataProto({"ids": rows_of(1, 10_000)})
    shipped = len(pickle.dumps(data))
    assert data.batch["ids"].shape == (2, 10_000)
    assert len(pickle.dumps(data)) == shipped < 41_000
    assert b"torch" not in pickle.dumps(data)


def test_a_shipped_slice_carries_its_own_rows_only() -> None:
    data = DataProto({"ids": rows_of(1, 10_000)})
    assert len(pickle.dumps(data[:1])) < 1_000


def test_a_batch_loaded_from_read_only_buffers_reads_as_tensors() -> None:
    buffers: list[pickle.PickleBuffer] = []
    frame = pickle.dumps(small(), protocol=5, buffer_callback=buffers.append)
    loaded = pickle.loads(frame, buffers=[bytes(buffer.raw()) for buffer in buffers])
    assert loaded.batch["scores"].tolist() == [0.5, 1.0, 0.0]
    assert loaded.batch["input_ids"].shape == (3, 3)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (object(), r"column 'x', row 1: a builtins.object cannot be saved as JSON"),
        (np.int64(3), r"column 'x', row 1: a numpy.int64 cannot"),
        ({"a": [1, {2}]}, r"column 'x', row 1\['a'\]\[1\]: a builtins.set cannot"),
        ((1, 2), r"column 'x', row 1: a builtins.tuple cannot"),
        ({1: 2}, r"column 'x', row 1: JSON keys are strings, got the int 1"),
    ],
)
def test_an_object_that_json_would_change_is_named_and_nothing_is_written(
    tmp_path: Path, value: object, message: str
) -> None:
    with pytest.raises(TypeError, match=message):
        DataProto(non_tensor_batch={"x": [None, value]}).to_disk(tmp_path / "batch")
    assert list(tmp_path.iterdir()) == []


def test_meta_info_that_is_not_json_is_named(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"meta_info\['when'\]: a builtins.complex"):
        DataProto(meta_info={"when": 1j}).to_disk(tmp_path / "batch")


def test_saving_over_a_batch_is_refused(tmp_path: Path) -> None:
    small().to_disk(tmp_path / "runs" / "batch")
    with pytest.raises(FileExistsError, match="remove it or choose another"):
        small().to_disk(tmp_path / "runs" / "batch")
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["batch"]


def test_a_save_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    data = DataProto({"x": np.zeros(1)}, {"too long for Python's own JSON": [10**5000]})
    with pytest.raises(ValueError, match="integer string conversion"):
        data.to_disk(tmp_path / "batch")
    assert list(tmp_path.iterdir()) == []


def test_a_batch_of_another_format_is_refused(tmp_path: Path) -> None:
    small().to_disk(tmp_path / "batch")
    document = tmp_path / "batch" / "data.json"
    document.write_text(json.dumps({**json.loads(document.read_text()), "format": 99}))
    with pytest.raises(ValueError, match="has format 99, this version of cadenza reads 1"):
        DataProto.from_disk(tmp_path / "batch")


# Schema


def test_a_train_batch_keeps_its_schema_with_and_without_what_is_optional() -> None:
    data = train_batch()
    TRAIN_BATCH.check(data)
    data.batch.assign_like("versions", np.zeros((2, 3), np.int32), like="input_ids", pad=-1)
    data, _ = data.pad_to_multiple(4)
    data.batch["anything"] = np.zeros(4)
    TRAIN_BATCH.check(data)


def test_a_schema_error_names_every_column_at_fault() -> None:
    data = train_batch()
    data.batch["input_ids"] = np.zeros(2, np.float32)
    del data.batch["scores"]
    with pytest.raises(SchemaError) as caught:
        TRAIN_BATCH.check(data)
    assert str(caught.value).splitlines() == [
        "column 'input_ids': expected ragged int32 or int64 [N, L], got float32 [2]",
        "column 'scores': expected float32 or float64 [N], it is missing",
    ]
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_token_columns_of_other_lengths_are_a_schema_error() -> None:
    data = train_batch()
    data.batch["response_mask"] = Ragged(np.ones(5, np.bool_), [0, 3, 5])
    with pytest.raises(SchemaError, match="column 'response_mask', row 0: 3 tokens, but 'input_ids' has 2"):
        TRAIN_BATCH.check(data)


def test_a_schema_tells_objects_from_numbers() -> None:
    schema = Schema({"task": Column((), "object"), "pixels": Column(("uint8",), ndim=3)})
    schema.check(DataProto({"pixels": np.zeros((1, 2, 2), np.uint8)}, {"task": ["a"]}))
    with pytest.raises(SchemaError, match=r"'task': expected object \[N\], got int64 \[1\]"):
        schema.check(DataProto({"task": np.zeros(1, np.int64), "pixels": np.zeros((1, 2, 2), np.uint8)}))
    with pytest.raises(SchemaError, match=r"'pixels': expected uint8 \[N, L, D2\], got uint8 \[1, 2\]"):
        schema.check(DataProto({"pixels": np.zeros((1, 2), np.uint8)}, {"task": ["a"]}))
